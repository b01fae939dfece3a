"""Texts in the tokens of frozen language models, and lists of facts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract import IGNORE
from data.latent.facts import draw_lists
from data.latent.readers import Reader
from data.tokenizer import Bytes
from tests.making import make_source
from utils.errors import ConfigError
from utils.noise import generator

KEYS = {"passage_len": 8, "gap": 2, "text": 5, "embedded": {"mebibytes": 1, "bpe": None}}


def make(paths: list[str], **changes: Any) -> Any:
    keys = KEYS | {"shards": 1, "global_batch_size": 8} | changes
    return make_source("passages", readers=paths, **keys)


def test_every_reader_gets_the_same_text_in_its_own_tokens(readers: str) -> None:
    paths = readers.strip("[]").split(",")
    rows = make(paths).train_batch(0, 0)
    opened = [Reader("arch.readers", path) for path in paths]
    decode = Bytes().decode
    for row in range(8):
        passage = decode(rows["passage"][row])
        for number, reader in enumerate(opened):
            tokens = rows[f"passage_{number}"][row]
            told = tokens[tokens != IGNORE]
            assert passage.endswith(reader.tokenizer.decode(told))
            assert (tokens[: len(tokens) - len(told)] == IGNORE).all(), "padded on the left"
            read, wanted = rows[f"text_{number}"][row], rows[f"labels_{number}"][row]
            count = int((wanted != IGNORE).sum())
            assert (wanted[count:] == IGNORE).all(), "padded on the right"
            assert (read[1:count] == wanted[: count - 1]).all(), "each token predicts the next"
    lengths = [(rows[f"passage_{number}"] != IGNORE).sum() for number in range(2)]
    assert lengths[1] < lengths[0], "byte pairs are fewer"


def test_each_held_out_text_is_predicted_once(readers: str) -> None:
    held_out = make([], val_passages=50).eval_sets()["val"].passages
    assert len(held_out) == 50
    windows = held_out.tokens(np.arange(50))
    whole = np.concatenate([windows[0, :10], windows[:, 10:].reshape(-1)])
    assert (held_out.tokens(np.arange(1)) == whole[:15]).all()
    assert (windows[1] == whole[5:20]).all()


def test_answers_alone_count_and_are_in_the_list(readers: str) -> None:
    for passage, pieces in draw_lists(5, 3, 20, generator(0, "test")):
        assert len(pieces) == 6
        for (key, read), (value, predicted) in zip(pieces[::2], pieces[1::2], strict=True):
            assert (read, predicted) == (False, True)
            assert passage.count(f"{key}{value}") == 1
    sizes = {"seq_len": 40, "facts": 4, "asked": 4, "least": 2}
    rows = make_source("fact_text", **sizes, shards=1, global_batch_size=8, max_steps=1)
    rows = rows.train_batch(0, 0)
    counted = rows["labels"] != IGNORE
    assert (rows["labels"][counted] < 256).all()
    digits = bytes(rows["labels"][counted].tolist()).decode()
    assert digits.isdigit()
    asked = [(row == ord(";")).argmax() for row in rows["inputs"]]
    for row, end in enumerate(asked):
        assert not counted[row, : end + 1].any(), "the list itself is not predicted"


def test_what_cannot_be_read_is_one_line(readers: str, tmp_path: Path) -> None:
    path = readers.strip("[]").split(",")[0]
    with pytest.raises(ConfigError, match=r"^arch.readers\[0\]=.*: reads 16 tokens, and a passage"):
        make([path], passage_len=20)
    with pytest.raises(ConfigError, match=r"^arch.readers\[0\]=nowhere: no such folder; give"):
        make(["nowhere"])
    os.mkfifo(tmp_path / "tokenizer.json")
    for config in ("{}", "{", '{"vocab_size": 9, "max_position_embeddings": 9}'):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(
            ConfigError, match=r"^arch.readers\[0\]=.*: cannot be read .*; give a folder"
        ):
            make([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"^data.least=5: must not exceed data.facts=4"):
        make_source(
            "fact_text", seq_len=40, facts=4, asked=4, least=5, global_batch_size=8, max_steps=1
        )
    with pytest.raises(ConfigError, match=r"^data.seq_len=10: lists with their questions take"):
        make_source(
            "fact_text", seq_len=10, facts=4, asked=4, least=2, global_batch_size=8, max_steps=1
        )
