"""Folders of Llama models: what does not fit the data is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from models import llama
from models.language.gpt import GPT
from utils.errors import ConfigError
from utils.spec import Spec


def test_the_data_s_vocabulary_is_named_where_it_is_another(tmp_path: Path) -> None:
    keys = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "forward_dtype": "float32"}
    net = GPT(Spec(vocab_size=256, seq_len=8), **keys)
    llama.write(tmp_path, net.state_dict(), net.shape, 8)
    found = llama.read(tmp_path, net.shape, 256)
    assert found.keys() == net.state_dict().keys()
    with pytest.raises(ConfigError, match=r"vocabulary has 256 tokens, and the data.s 257"):
        llama.read(tmp_path, net.shape, 257)
