"""Latents in place of a passage: how much of it they keep, compared with the model's own losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from contract import IGNORE, Context, Noise, Spec
from models.latent.compress import Compress
from tests.making import make_objective, make_source
from utils.errors import ConfigError

CONTEXT = Context(0.0, Noise(0, 0, [0]))
PASSAGE, TEXT, LATENTS = 12, 4, 3


@pytest.fixture(scope="module")
def spec() -> Spec:
    source = make_source(
        "tokens", seq_len=PASSAGE + TEXT, max_steps=1, embedded={"mebibytes": 1}, max_new_tokens=0
    )
    return source.spec


@pytest.fixture
def make(gpt_target: Path, spec: Spec) -> Any:
    def made(**keys: Any) -> Compress:
        keys = {"passage": PASSAGE, "latents": LATENTS, "forward_dtype": "float64"} | keys
        return make_objective("prefix", spec, target=str(gpt_target), **keys)

    return made


def batch_of(rows: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (rows, PASSAGE + TEXT + 1), generator=draw, dtype=torch.int32)
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def test_all_but_the_model_trains(make: Any) -> None:
    objective = make()
    nn.init.normal_(objective.model.map.weight)  # at first it is zero, and gradients end there
    objective(batch_of(5), None, CONTEXT).loss.backward()
    for name, parameter in objective.named_parameters():
        trains = not name.startswith("model.target.")
        assert parameter.requires_grad == trains
        assert (parameter.grad is not None and bool(parameter.grad.any())) == trains, name


def test_latents_by_hand(make: Any) -> None:
    model, passage = make().model, batch_of(5)["inputs"][:, :PASSAGE]
    embedded = model.net.embed(passage)[:, -LATENTS:]
    assert_close(model.encode(passage), embedded)
    nn.init.normal_(model.map.weight)
    size = model.net.embed_tokens.embedding_weight.square().mean().sqrt()
    wanted = embedded + size * model.map(model.net(passage)[:, -LATENTS:])
    assert_close(model.encode(passage), wanted)


def test_evaluations_compare_latents_with_what_the_model_reads_instead(make: Any) -> None:
    """The model's own loss behind nothing, behind the last tokens and behind the whole passage."""
    objective, batch = make(), batch_of(5)
    net = objective.model.net
    labels = batch["labels"][:, PASSAGE:].long()
    labels[3:, 1:] = IGNORE
    with torch.no_grad():
        found = objective.predict({**batch, "labels": F.pad(labels, (PASSAGE, 0), value=7)}).metrics
        nats = {}
        for way, kept in {"none": 0, "last": LATENTS, "whole": PASSAGE}.items():
            logits = net.logits(net(batch["inputs"][:, PASSAGE - kept :]))[:, kept:]
            nats[way] = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            assert_close(found[f"loss_{way}"], (nats[way], torch.tensor(14)))
    assert_close(found["share_last"], (nats["none"] - nats["last"], nats["none"] - nats["whole"]))
    assert_close(found["share"], (nats["none"] - found["loss"][0], nats["none"] - nats["whole"]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"passage": 16}, "arch.passage=16: leaves none of data.seq_len=16 to predict; give less"),
        ({"latents": 13}, "arch.latents=13: must not exceed arch.passage=12"),
    ],
)
def test_impossible_keys_are_refused(keys: dict[str, Any], message: str, make: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        make(**keys)
