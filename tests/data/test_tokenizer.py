"""Text to ids: a special token in a text is text, and published files give the same ids."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from data.tokenizer import Bytes, FromFile, Tokenizer, train_bpe

TEXT = "né <|begin|> x\n\x00\xad日本🙂 \r\n <|begin|>"


def bpe() -> FromFile:
    return FromFile("x", "y", content=train_bpe(iter([TEXT * 10]), 300, 10**6).encode())


def plainly_listed() -> FromFile:
    """A tokenizer whose begin token is not marked as special."""
    content = json.loads(bpe().content)
    content["added_tokens"][0]["special"] = False
    return FromFile("x", "y", content=json.dumps(content).encode())


@pytest.mark.parametrize("made", [Bytes, bpe, plainly_listed])
def test_text_is_never_read_as_special_tokens(made: type[Tokenizer]) -> None:
    tokenizer = made()
    (ids,) = tokenizer.encode([TEXT])
    assert tokenizer.begin not in ids.tolist()
    assert tokenizer.decode(ids.tolist()) == TEXT
    assert np.array(tokenizer.token_bytes)[ids].sum() == len(TEXT.encode()) or (
        made is plainly_listed
    )


def test_a_word_that_is_the_begin_token_begins_nothing(tmp_path: Path) -> None:
    library = Library(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "words.json"))
    tokenizer = FromFile("x", tmp_path / "words.json")
    assert tokenizer.begin == 0
    assert tokenizer.encode(["a <s> a"])[0].tolist() == [1, 1]


@pytest.mark.parametrize("made", [Bytes, bpe])
def test_a_published_tokenizer_begins_texts_as_evaluations_do(made: type[Tokenizer]) -> None:
    tokenizer = made()
    library = Library.from_str(tokenizer.published())
    assert library.get_vocab_size() == tokenizer.vocab_size
    library.encode_special_tokens = True
    text = "".join(map(chr, range(300))) + TEXT
    assert library.encode(text).ids == [tokenizer.begin, *tokenizer.encode([text])[0].tolist()]
    assert library.decode(library.encode(text).ids) == text
