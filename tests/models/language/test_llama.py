"""Folders of Llama models and their relatives: logits are those of transformers, in and out, and
what cannot be read is one line.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from contract import Spec
from models.language import llama, targets
from models.language.gpt import GPT
from models.objective import load_tensors, saved_tensors
from tests.making import make_objective
from utils.errors import ConfigError

SPEC = Spec(vocab_size=23, seq_len=64)
TOKENS = torch.randint(0, 23, (3, 64), generator=torch.Generator().manual_seed(0))
SMALL = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPE = {"rope_type": "llama3", "rope_theta": 100.0, **SCALING}
KINDS = {
    "llama": ("Llama", {}),
    "llama with wide heads": ("Llama", {"head_dim": 8, "tie_word_embeddings": True}),
    "llama 3.1": ("Llama", {"head_dim": 16, "rope_parameters": ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3 with long rope": ("Qwen3", {"head_dim": 16, "rope_parameters": ROPE}),
}


def published(folder: Path, kind: str, **more: Any) -> Any:
    """A random net of transformers, saved; every weight does something."""
    transformers = pytest.importorskip("transformers")
    name, keys = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SMALL | keys | more)
    torch.manual_seed(3)
    net = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            noise = torch.rand_like(parameter)
            if parameter.ndim == 1:
                parameter.mul_(1 + noise).add_(noise)
            else:
                parameter.mul_(6 * (1 + noise))
    net.save_pretrained(folder)
    return net


def shaped(**keys: Any) -> Any:
    """A net of our own."""
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 4} | keys
    return make_objective("gpt", SPEC, **shape)


def said_by(net: Any) -> torch.Tensor:
    with torch.no_grad():
        return net(TOKENS).logits


def our_logits(net: GPT) -> torch.Tensor:
    with torch.no_grad():
        return net.logits(net(TOKENS))


def changed(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_in_and_out(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = said_by(published(tmp_path / "theirs", kind))
    assert expected.std() > 0.1, "logits this small show little"
    frozen = targets.load_frozen(str(tmp_path / "theirs"), SPEC, "float32", (GPT,), "")
    assert_close(our_logits(frozen.net), expected, rtol=1e-5, atol=2e-5)

    keys = llama.arch_in(tmp_path / "theirs")
    ours = make_objective("gpt", SPEC, **keys)
    load_tensors(ours, ours.published(str(tmp_path / "theirs")))
    assert torch.equal(our_logits(ours.model), our_logits(frozen.net))

    weights = {name.removeprefix("model."): tensor for name, tensor in saved_tensors(ours).items()}
    llama.write(tmp_path / "ours", weights, ours.model.shape, 64)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    name = KINDS[kind][0].replace("Mistral", "Llama")
    assert type(again).__name__ == f"{name}ForCausalLM"
    assert_close(said_by(again), expected, rtol=1e-5, atol=2e-5)


def test_a_config_of_transformers_4_is_read_as_one_of_5(tmp_path: Path) -> None:
    published(tmp_path, "llama 3.1")
    keys = llama.arch_in(tmp_path)
    before = {"rope_type": "llama3", **SCALING}
    changed(tmp_path, rope_parameters=None, rope_scaling=before, rope_theta=100.0)
    assert llama.arch_in(tmp_path) == keys
    assert keys["rope_scaling"] == SCALING


REFUSED = [
    ("llama", {"model_type": "granite"}, "model_type=granite, which arch=gpt is not; only llama,"),
    ("llama", {"hidden_size": "16"}, "hidden_size=16; it must be a whole number"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True, which arch=gpt does not have"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn, which"),
    ("mistral", {"sliding_window": 32}, "sliding_window=32, which"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True, which"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=sliding_att"),
]


@pytest.mark.parametrize(("kind", "keys", "line"), REFUSED, ids=[row[2][:30] for row in REFUSED])
def test_what_is_no_net_of_ours_is_refused_by_name(
    kind: str, keys: dict[str, Any], line: str, tmp_path: Path
) -> None:
    published(tmp_path, kind)
    net = make_objective("gpt", SPEC, **llama.arch_in(tmp_path))
    changed(tmp_path, **keys)
    for key, read in [
        ("init_from", lambda: net.published(str(tmp_path))),
        ("arch.target", lambda: targets.load_frozen(str(tmp_path), SPEC, "float32", (GPT,), "")),
    ]:
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value).startswith(f"{key}={tmp_path}: config.json has {line}")


def test_a_mistral_is_refused_if_nothing_says_that_its_window_is_off(tmp_path: Path) -> None:
    published(tmp_path, "mistral")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"has sliding_window=4096, which"):
        llama.arch_in(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_every_tensor_is_taken_or_named(kind: str, tmp_path: Path) -> None:
    published(tmp_path, kind)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.layers.0.self_attn.sinks", "model.layers.9.mlp.up_proj.weight"):
        save_file(tensors | {name: torch.ones(4)}, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=rf"^arch.target=.*: {name} has no place in arch=gpt"):
            targets.load_frozen(str(tmp_path), SPEC, "float32", (GPT,), "")
    for name in tensors:
        kept = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(kept, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=rf"{name} is in none of its safetensors files"):
            targets.load_frozen(str(tmp_path), SPEC, "float32", (GPT,), "")


def test_another_net_is_told_by_the_keys_it_needs(tmp_path: Path) -> None:
    published(tmp_path, "llama 3.1")
    net = shaped(num_layers=2, kv_heads=2, mlp_width=24)
    with pytest.raises(ConfigError) as caught:
        net.published(str(tmp_path))
    assert str(caught.value).endswith(
        "holds another net; add arch.head_dim=16 arch.rope_theta=100.0"
        " arch.rope_scaling='{factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0,"
        " original_max_position_embeddings: 32}'"
    )


def test_a_net_that_is_of_two_kinds_cannot_be_exported() -> None:
    shape = shaped(qk_norm=True, qkv_bias=True).model.shape
    with pytest.raises(ConfigError, match=r"^arch.qkv_bias=true: .* cannot be exported"):
        llama.config_of(shape, 23, 64, None)


def test_the_data_s_vocabulary_is_named_where_it_is_another(tmp_path: Path) -> None:
    net = shaped().model
    llama.write(tmp_path, net.state_dict(), net.shape, 8)
    with pytest.raises(ConfigError, match=r"vocabulary has 23 tokens, and the data.s 24"):
        llama.read(tmp_path, net.shape, 24)
