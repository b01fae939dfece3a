"""Tokenizers: bytes, or a `tokenizer.json` of the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from contract import Spec
from utils.errors import ConfigError, brief
from utils.files import read_bytes

LARGEST_FILE, LARGEST_VOCABULARY = 1 << 28, 1 << 24
# names of begin tokens; the first that a tokenizer has is its own
BEGINS = (
    "<|begin|>", "<|bos|>", "<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|endoftext|>",
    "<|im_start|>", "</s>", "[CLS]",
)  # fmt: skip
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class TextSpec(Spec):
    """The facts of text for a net."""

    token_bytes: tuple[int, ...] = ()  # the bytes of text of each token, if known
    begin_token: int | None = None  # the token before a text
    # the most documents in a row, if attention should stay within them
    most_documents: int = field(default=0, compare=False)
    tokenizer: Tokenizer | None = field(default=None, compare=False, repr=False)


class Tokenizer(Protocol):
    """Converts text to ids and back."""

    name: str  # as dataset.json has it
    vocab_size: int
    begin: int | None  # the id before each document

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, without a begin token. Text that spells a special token
        stays text.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def published(self) -> str:
        """Returns a tokenizer.json that puts the begin token before a text, as evaluations do."""
        ...

    @property
    def token_bytes(self) -> tuple[int, ...]:
        """The number of bytes of text of each id."""
        ...


class Bytes:
    """The bytes of UTF-8, and a begin token."""

    name, vocab_size = "bytes", 257
    begin: int | None = 256
    token_bytes = (*[1] * 256, 0)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(errors="surrogatepass"), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def published(self) -> str:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers

        # a BPE without merges: each byte stays its own token
        library = Library(models.BPE({_letter(byte): byte for byte in range(256)}, []))
        library.add_special_tokens([BEGINS[0]])
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        return _beginning_with(library, self.begin)


class FromFile:
    """A tokenizer of any kind from a file."""

    def __init__(
        self, key: str, path: Path | str, begin: str | None = None, content: bytes | None = None
    ) -> None:
        """`key` names the tokenizer in messages. `begin` is the token before each document, unless
        it is one of BEGINS. `content` replaces a file that does not exist.
        """
        from tokenizers import Tokenizer as Library

        self.name = "tokenizer.json"
        try:
            self.content = read_bytes(Path(path), LARGEST_FILE) if content is None else content
            self._library: Any = Library.from_str(self.content.decode())
        except Exception as error:  # the library's errors are plain Exceptions
            raise ConfigError(
                f"{key}: {path} is not a tokenizer ({brief(error)}); give a tokenizer.json that"
                " `tokenizers` wrote"
            ) from None
        # ids may have gaps, and added tokens are beyond the model's vocabulary
        self.vocab_size = 1 + max(
            self._library.get_vocab(with_added_tokens=True).values(), default=-1
        )
        if begin is not None and self._library.token_to_id(begin) is None:
            raise ConfigError(f"{key}: {path} has no token {brief(begin)}; give one that it has")
        # which token begins a document: the user's, or the first usual name that there is
        numbers = map(self._library.token_to_id, BEGINS if begin is None else (begin,))
        self.begin: int | None = next((number for number in numbers if number is not None), None)
        if self.begin is not None:  # some files list it among their plain tokens
            self._library.add_special_tokens([self._library.id_to_token(self.begin)])
        # text that spells a special token is encoded as the text that it is
        self._library.encode_special_tokens = True

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        ids_of_texts = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        if self.begin is None:
            return ids_of_texts
        # where whole words are tokens, the begin token may be one; no text of it is kept
        return [ids[ids != self.begin] for ids in ids_of_texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode([token for token in ids if token < self.vocab_size])

    def published(self) -> str:
        from tokenizers import Tokenizer as Library

        return _beginning_with(Library.from_str(self.content.decode()), self.begin)

    @cached_property
    def token_bytes(self) -> tuple[int, ...]:
        """Computed from the spelling of tokens; exact if the tokenizer does not change the text."""
        content = json.loads(self.content)
        # in byte-level tokenizers, a token's letters are bytes
        kinds = json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
        by_letter = '"ByteLevel"' in kinds
        # whether tokens outside the model's vocabulary are special
        added = {token["id"]: token.get("special") for token in content.get("added_tokens", ())}
        sizes = [0] * self.vocab_size  # special tokens have no text
        for token, number in self._library.get_vocab(with_added_tokens=True).items():
            if added.get(number):
                continue
            if by_letter and number not in added:
                sizes[number] = len(token)
            elif BYTE.fullmatch(token):
                sizes[number] = 1
            else:
                sizes[number] = len(token.replace("▁", " ").encode(errors="surrogatepass"))
        return tuple(sizes)


def _letter(byte: int) -> str:
    """Returns the letter for a byte in byte-level tokenizers: Latin-1's if it is visible, else one
    from 256 on.
    """
    hidden = [*range(33), *range(127, 161), 173]
    return chr(256 + hidden.index(byte) if byte in hidden else byte)


def _beginning_with(library: Any, begin: int | None) -> str:
    """Returns the file of a tokenizer that puts this token before every text."""
    from tokenizers.processors import TemplateProcessing

    if begin is not None and library.encode("a").ids[:1] != [begin]:
        token = library.id_to_token(begin)
        library.post_processor = TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, begin)]
        )
    return str(library.to_str())


def open_tokenizer(key: str, name: str, folder: Path) -> Tokenizer:
    """Opens `bytes`, or a file in the folder."""
    if name == "bytes":
        return Bytes()
    if not (folder / name).is_file():
        raise ConfigError(
            f"{key}: no tokenizer {brief(name)} there; put the tokenizer.json of these tokens"
            " there, or build them again"
        )
    return FromFile(key, folder / name)


def train_bpe(texts: Iterator[str], size: int, most: int) -> str:
    """Trains a byte-level BPE of `size` tokens, a begin token among them, on the first `most`
    characters.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    # a corpus may be endless, but a part of it is enough to learn from
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
    # all 256 bytes are tokens from the start, so that any text can be encoded
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BEGINS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(first(), trainer)
    return library.to_str()
