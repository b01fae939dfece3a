"""Trains a byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterator

from data.tokenizer import BEGINS


def train_bpe(texts: Iterator[str], size: int, most: int) -> str:
    """Trains a byte-level BPE of `size` tokens, a begin token among them, on the first `most`
    characters.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    def first() -> Iterator[str]:
        left = most
        for text in texts:
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        first(),
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[BEGINS[0]],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return library.to_str()
