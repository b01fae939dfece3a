"""Every parameter has exactly one owner, and a config can make only what is ours."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.testing import assert_close

from contract import RunLength
from models.sparse_embedding import SparseEmbedding
from optim.groups import build_dense, build_sparse
from optim.schedule import build_schedule
from utils.errors import ConfigError
from utils.ranks.distributed import Dist

CONF = Path(__file__).resolve().parents[2] / "conf"
ROOT_KEYS = {
    "lr": 1e-2,
    "lr_min_ratio": 0.1,
    "lr_warmup_steps": 5,
    "lr_decay_share": None,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
}
LAYERS = {
    "model.inner.embed_tokens.embedding_weight": (7, 8),
    "model.inner.lm_head.weight": (7, 8),
    "model.inner.q_head.weight": (2, 8),
    "model.inner.q_head.bias": (2,),
    "model.inner.L_level.layers.0.self_attn.qkv_proj.weight": (24, 8),
    "model.inner.L_level.layers.0.mlp.down_proj.weight": (8, 16),
    "model.inner.H_level.layers.11.mlp_t.gate_up_proj.weight": (32, 4),
}


def parameters(shapes=LAYERS):
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def config_of(name):
    loaded = OmegaConf.load(CONF / "optim" / f"{name}.yaml")
    merged = OmegaConf.merge(ROOT_KEYS, loaded if "optim" in loaded else {"optim": loaded})
    return OmegaConf.to_container(merged.optim, resolve=True)


def dense(match=".*", target="optim.builtin.sgd", **keys):
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    return [{"match": match, "optimizer": {"_target_": target, **sgd, **keys}}]


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "optim").glob("*.yaml")))
def test_every_config_trains_every_parameter_once(name):
    config, named = config_of(name), parameters()
    optimizers = build_dense(config["dense"], named)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    owned = [p for group in groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, named.values()))
    assert [group["base_lr"] for group in groups] == [group["lr"] for group in groups]
    assert [group["lr"] for group in groups] == [
        2e-2 if name == "muon" and not number else 1e-2 for number in range(len(groups))
    ]
    sizes = []  # of a quadratic, which must shrink
    for _ in range(6):
        sizes.append(sum(float(p.detach().square().sum()) for p in named.values()))
        for p in named.values():
            p.grad = 2 * p.detach()
        for optimizer in optimizers:
            optimizer.step()
    assert sizes[-1] < sizes[0]
    assert 0 < build_schedule(config.get("schedule"), RunLength(20, 1, 4))(3) <= 1


@pytest.mark.parametrize("net", ["hrm", "trm"])
def test_nets_with_a_table_say_who_trains_it(net):
    config = OmegaConf.load(CONF / "arch" / f"{net}.yaml")
    OmegaConf.update(config, "puzzle_emb_lr", 1e-2)
    config = OmegaConf.to_container(config, resolve=True)["optim"]["sparse"]
    (sparse,) = build_sparse(config, {"table": SparseEmbedding(3, 2)}, 4, Dist())
    assert sparse.param_groups[0]["base_lr"] == 1e-2
    assert build_sparse(config, {}, 4, Dist()) == build_sparse(None, {}, 4, Dist()) == []
    with pytest.raises(ConfigError, match=r"^optim.sparse=null: needs a _target_"):
        build_sparse(None, {"table": SparseEmbedding(3, 2)}, 4, Dist())


def test_muon_gets_the_matrices_of_the_layers_only():
    made = build_dense(config_of("muon")["dense"], parameters())
    assert [type(optimizer).__name__ for optimizer in made] == ["Muon", "AdamW"]
    for optimizer, of_layers in zip(made, (True, False), strict=True):
        names = [name for name in LAYERS if (".layers." in name) == of_layers]
        assert optimizer.param_groups[0]["param_names"] == names


def test_norms_and_biases_do_not_decay_where_matrices_alone_do():
    named = parameters()
    (adamw,) = build_dense(config_of("adamw_matrices")["dense"], named)
    before = {name: p.detach().clone() for name, p in named.items()}
    for p in named.values():
        p.grad = torch.zeros_like(p)
    adamw.step()
    for name, p in named.items():
        assert_close(p.detach(), before[name] * (1 - 1e-2 * 0.1) if p.ndim > 1 else before[name])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        # whole names, not beginnings
        (dense(match="model"), "no pattern matches parameter model.inner.embed_tokens"),
        (dense() + dense(match="conv.*"), r"optim.dense\[1\].match=conv\.\*: matches no parameter"),
        (
            dense() + dense(match=".*bias"),
            r"optim.dense\[1\].match=\.\*bias: earlier patterns claim all",
        ),
        (dense(match="("), r"optim.dense\[0\].match=\(: not a regular expression"),
        (dense(momentun=0.5), r"optim.dense\[0\].optimizer.momentun=0.5: unknown key; did"),
        (dense(momentum=-3), r"optim.dense\[0\].optimizer: .*momentum=-3.*Invalid momentum"),
        (dense(lr="fast"), r"optim.dense\[0\].optimizer.lr=fast: must be a valid number"),
        (dense(target="torch.optim.SGD"), "_target_=torch.optim.SGD: must be a class or"),
        (dense(target="optim.builtin.muon"), r"Muon takes matrices, but .*bias has shape \(2,\)"),
        ([], r"^optim.dense: no pattern matches parameter"),
        ([{"match": ".*", "optimizer": {"lr": 1}}], r"\[0\].optimizer._target_=null"),
    ],
)
def test_mistakes_are_one_line_that_names_them(config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_dense(config, parameters())
    assert "\n" not in str(caught.value)
