"""Folders of GPT-2: logits are those of transformers, and what cannot be read is one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from contract import Spec
from data.tokenizer import TextSpec
from models.decomposition.seams import seams_of
from models.language import targets
from models.language.targets import GPT, GPT2
from utils.errors import ConfigError

SPEC = TextSpec(vocab_size=23, seq_len=64)
TOKENS = torch.randint(0, 23, (3, 64), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 23, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}


def published(folder: Path, **more: Any) -> Any:
    """A random net of transformers, saved; every weight does something."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL | more)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(4).add_(0.05 * torch.rand_like(parameter))
    net.save_pretrained(folder)
    return net


def load(folder: Path, spec: Spec = SPEC, dtype: str = "float32") -> Any:
    return targets.load_frozen(str(folder), spec, dtype, (GPT, GPT2), "").net


def logits_of(net: Any) -> torch.Tensor:
    with torch.no_grad():
        return net.logits(net(TOKENS))


@pytest.mark.parametrize("keys", [{}, {"n_inner": 24, "layer_norm_epsilon": 1e-3}])
def test_logits_are_those_of_transformers(keys: dict[str, Any], tmp_path: Path) -> None:
    theirs = published(tmp_path, **keys)
    with torch.no_grad():
        narrow, wide = theirs(TOKENS).logits, theirs.double()(TOKENS).logits
    assert wide.std() > 0.1, "logits this small show little"
    ours = logits_of(load(tmp_path))
    assert_close(ours, narrow, rtol=1e-5, atol=2e-5)
    assert_close(logits_of(load(tmp_path, dtype="float64")), wide, rtol=1e-9, atol=1e-9)
    assert (logits_of(load(tmp_path, dtype="bfloat16")) - narrow).abs().mean() < 0.05 * wide.std()

    # the files of 2019 on the hub: no prefix, masks, half of the keys
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    older = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(older | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, file, {"format": "pt"})
    config.write_text(json.dumps({"model_type": "gpt2", **SMALL, **keys}))
    assert torch.equal(logits_of(load(tmp_path)), ours)


def test_its_matrices_can_be_decomposed(tmp_path: Path) -> None:
    published(tmp_path)
    seams = seams_of(load(tmp_path))
    parts = [name for name in seams if name.startswith("layers.1.")]
    attention = [f"layers.1.self_attn.{name}_proj" for name in ("qkv", "q", "k", "v", "o")]
    assert parts == [*attention, "layers.1.mlp.up_proj", "layers.1.mlp.down_proj"]


@pytest.mark.parametrize(
    ("keys", "spec", "line"),
    [
        ({"activation_function": "gelu"}, SPEC, "config.json has activation_function=gelu; only"),
        ({"n_embd": "x"}, SPEC, "n_embd"),
        ({}, replace(SPEC, seq_len=65), "data.seq_len=65: it has 64 positions"),
        ({}, replace(SPEC, vocab_size=24), "vocabulary has 23 tokens, and the data's 24"),
        ({}, replace(SPEC, most_documents=2), "data.documents=true: its positions count"),
        ({"n_layer": 3}, SPEC, "layers.2.attn_norm.weight is missing"),
        ({"n_layer": 1}, SPEC, "holds layers.1.self_attn.qkv_proj.bias, which is not in this net"),
    ],
)
def test_what_does_not_fit_is_refused(
    keys: dict[str, Any], spec: Spec, line: str, tmp_path: Path
) -> None:
    published(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    with pytest.raises(ConfigError, match=r"^arch.target=") as caught:
        load(tmp_path, spec)
    assert line in str(caught.value)
