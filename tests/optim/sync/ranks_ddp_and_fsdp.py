"""Run on every rank by test_ddp_and_fsdp.py: each way to synchronise trains as one process does;
with `few`, the main ones.

Each rank computes what a single process would have, because all data is a function of (step,
shard).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.objective import Context, Objective, StepOut
from optim.agreement import Agreement
from optim.builtin import adamw_matrices
from optim.optimizer_state import OptimizerState
from optim.sync.allreduce import AllReduce
from optim.sync.base import Sync
from tests.making import make_objective, make_sync
from utils.averages import EMA
from utils.checkpoint.registry import Registry
from utils.errors import ConfigError, RunError
from utils.measure.evaluator import Prediction
from utils.noise import Noise
from utils.ranks import distributed
from utils.ranks.distributed import Dist
from utils.spec import Spec

SHARDS, STEPS, MIDDLE = 8, 4, 2
ALONE = Dist()
WAYS: dict[str, Callable[[], Sync]] = {
    "allreduce": AllReduce,
    "ddp": partial(make_sync, "ddp"),
    "ddp that searches": partial(make_sync, "ddp", find_unused_parameters=True),
    "ddp that knows": partial(make_sync, "ddp", static_graph=True),
    "fsdp": partial(make_sync, "fsdp"),
    "fsdp that keeps": partial(make_sync, "fsdp", reshard_after_forward=False),
}


def language_model(**keys: Any) -> Objective:
    """With norms and an embedding of which not every rank has a share at 4 ranks."""
    arch = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "forward_dtype": "float64", **keys}
    return make_objective("gpt", Spec(vocab_size=3, seq_len=6), loss={"chunk_tokens": 5}, **arch)


def tokens(step: int, shards: Sequence[int]) -> dict[str, Tensor]:
    rows = [
        torch.randint(0, 3, (2, 7), generator=torch.Generator().manual_seed(100 * step + shard))
        for shard in shards
    ]
    text = torch.cat(rows).int()
    return {"inputs": text[:, :-1], "labels": text[:, 1:]}


@dataclass
class Run:
    """A few steps as pretrain.py makes them."""

    objective: Any
    sync: Sync
    dist: Dist
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wrapped = self.sync.wrap(self.objective, self.dist)
        named = list(self.sync.parameters.items())
        self.optimizer = adamw_matrices(named, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
        self.ema, self.memory = EMA(self.sync.parameters, {}, 0.5), OptimizerState([self.optimizer])

    def step(self, number: int, parts: int, max_norm: float = 0.5) -> None:
        owned = list(self.dist.owned_shards(SHARDS))
        cut = [[*owned[part::parts]] for part in range(parts)]
        self.sync.zero()
        weights = []
        for part in cut:
            batch, ctx = (
                tokens(number, part),
                Context(0.0, Noise(0, number, part, self.dist.device)),
            )
            with torch.no_grad():
                assert self.objective.statistics(batch, None, ctx) == {}
            with self.sync.backward(last=part is cut[-1]):
                out = self.wrapped(batch, None, ctx)
                out.loss.backward()
            weights.append(out.weight)
        self.sync.finish(weights)
        self.sync.clip(max_norm)
        self.optimizer.step()
        self.ema.update()
        with torch.no_grad(), self.ema.applied():
            self.losses.append(float(self.objective.predict(tokens(999, [0])).metrics["loss"][0]))

    def saved(self) -> dict[str, Tensor]:
        state = {
            "model": self.objective.saved(),
            "ema": self.ema.state(),
            "optimizer": self.memory.state(),
        }
        whole = {}
        for group, tensors in state.items():
            for name, tensor in tensors.items():
                own = local(tensor).clone()
                shared = self.sync.row_range(name, own.ndim) is None
                parts = [own] if shared else self.dist.gather(own)
                if parts is not None:
                    whole[f"{group}/{name}"] = torch.cat(parts) if len(parts) > 1 else own
        return whole

    def load(self, saved: dict[str, Tensor], step: int) -> None:
        whole: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
        for name, tensor in saved.items():
            whole[name.partition("/")[0]][name.partition("/")[2]] = tensor.clone()
        registry = Registry(lambda: pytest.fail("nobody saves"), self.sync)
        registry.add("model", self.objective.saved, self.objective.load_saved)
        registry.add("ema", self.ema.state, self.ema.load)
        registry.add("optimizer", self.memory.state, self.memory.load, self.memory.like)
        parts = {name: kept(tensors) for name, tensors in whole.items()}
        registry.check(parts, step)
        registry.load(parts)


@dataclass
class Kept:
    """A whole tensor, read as one of a checkpoint."""

    meta: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.meta.shape)

    def read(self, first: int = 0, stop: int | None = None) -> Tensor:
        return (self.meta[first:stop] if self.shape else self.meta).clone()

    def read_into(self, out: Tensor, first: int = 0) -> None:
        out.copy_(self.read(first, first + len(out)) if self.shape else self.meta)


def kept(tensors: dict[str, Tensor]) -> Any:
    return {name: Kept(tensor) for name, tensor in tensors.items()}


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def alike(saved: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-9) -> None:
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        atol_here = 1e-6 if name.startswith("ema") else atol  # averages are float32
        torch.testing.assert_close(
            saved[name], tensor, rtol=0, atol=atol_here, msg=lambda m, n=name: f"{n}: {m}"
        )


def language_models_train_alike(dist: Dist) -> None:
    """The losses of averages, weights, averages and memories of one process; and the rest of the
    way from its checkpoint.
    """
    for keys in ({}, {"tied": True, "recompute": True}):
        one = Run(language_model(**keys), AllReduce(), ALONE)
        for step in range(STEPS):
            one.step(step, 1)
            if step == MIDDLE - 1:
                middle = one.saved()
        end = one.saved()
        for way, parts in [
            (way, parts) for way in WAYS for parts in (1, 4) if parts <= SHARDS // dist.world_size
        ]:
            if (keys or "few" in sys.argv) and (way not in ("ddp", "fsdp") or parts == 1):
                continue
            run = Run(language_model(**keys), WAYS[way](), dist)
            for step in range(STEPS):
                run.step(step, parts)
            # of float32 averages
            torch.testing.assert_close(run.losses, one.losses, rtol=0, atol=1e-6)
            saved = run.saved()
            if dist.is_main:
                alike(saved, end)
            again = Run(language_model(**keys), WAYS[way](), dist)
            again.load(middle, MIDDLE)
            for step in range(MIDDLE, STEPS):
                again.step(step, parts)
            saved = again.saved()
            if dist.is_main:
                alike(saved, end)


def shares_are_small(dist: Dist) -> None:
    """A rank's weights, averages and memories are its share of them; and what a forward has fetched
    is let go.
    """
    run = Run(language_model(), WAYS["fsdp"](), dist)
    whole = sum(t.numel() for t in language_model().parameters())
    run.step(0, 1)
    for copies, tensors in (
        (1, run.sync.parameters),
        (1, run.ema.state()),
        (2, run.memory.state()),
    ):
        share = sum(t.numel() for t in tensors.values())
        assert share < copies * whole / dist.world_size + 8 * len(tensors), (share, whole)
    places = {name: p.data_ptr() for name, p in run.sync.parameters.items()}
    assert all(
        p.to_local().data_ptr() == places[name] for name, p in run.objective.named_parameters()
    ), "they share memory"


class Tiny(Objective):
    """Three parameters, one of which a step may leave without a gradient."""

    def __init__(self, reach_all: bool = True) -> None:
        super().__init__(
            nn.ParameterDict(
                {name: nn.Parameter(torch.ones(5)) for name in ("first", "second", "spare")}
            )
        )
        self.reach_all = reach_all

    def forward(self, batch: Any, carry: Any, ctx: Any) -> StepOut:
        loss = sum(
            (p * batch["x"]).sum()
            for name, p in self.model.items()
            if self.reach_all or name != "spare"
        )
        return StepOut(loss, torch.tensor(1.0), {}, carry)

    def statistics(self, batch: Any, carry: Any, ctx: Any) -> dict[str, Tensor]:
        return {"whole": self.model["first"].sum() * batch["x"].sum()}

    def predict(self, batch: Any) -> Prediction:
        return Prediction({"sum": (self.model["first"].sum(), torch.tensor(1))}, {})


def judged(
    agreement: Agreement, sync: Sync, wrapped: nn.Module, x: float = 1.0, weight: float = 1.0
) -> str:
    """Where a step is first seen not to be finite."""
    sync.zero()
    with sync.backward(last=True):
        carry = object()
        out = wrapped({"x": torch.full((5,), x)}, carry, None)
        assert out.carry is carry, "the carry is nobody's business"
        out.loss.backward()
    checked = {"weight": sync.finish([weight])}
    checked |= {name: p.grad for name, p in sync.parameters.items()}
    agreement.ask(0, checked, [], [])
    return agreement.read().rpartition(" in ")[2]


def gradients_that_are_not_finite_are_named(dist: Dist) -> None:
    mine = dist.rank == dist.world_size - 1
    for way in ("ddp", "fsdp"):
        sync, agreement = WAYS[way](), Agreement("skip", dist)
        wrapped = sync.wrap(Tiny(), dist)
        assert judged(agreement, sync, wrapped) == ""
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in sync.parameters.values()), (
            "summed, then divided"
        )
        found = judged(agreement, sync, wrapped, x=float("nan") if mine else 1.0)
        assert found == "model.first"
        if dist.world_size > 1:  # finite everywhere, until it is added
            assert judged(agreement, sync, wrapped, x=3e38) == "model.first"
        found = judged(agreement, sync, wrapped, weight=float("inf") if mine else 1.0)
        assert found == "weight"
        judged(agreement, sync, wrapped, x=2.0)
        torch.testing.assert_close(sync.clip(1.0), torch.tensor(2 * 15**0.5))
        assert all(
            torch.allclose(p.grad, torch.full_like(p, 15**-0.5)) for p in sync.parameters.values()
        )


def parameters_may_be_left_out(dist: Dist) -> None:
    """They count as zeros; DDP must be told."""
    for sync in (WAYS["ddp that searches"](), WAYS["fsdp"]()):
        wrapped = sync.wrap(Tiny(reach_all=False), dist)
        for _ in range(2):
            step_of(sync, wrapped)
            assert not sync.parameters["model.spare"].grad.any()
    sync = WAYS["ddp"]()
    with pytest.raises(RunError, match=r"^sync.find_unused_parameters=false: the last micro-batch"):
        step_of(sync, sync.wrap(Tiny(reach_all=False), dist))


def step_of(sync: Sync, wrapped: nn.Module) -> None:
    sync.zero()
    with sync.backward(last=True):
        wrapped({"x": torch.ones(5)}, None, None).loss.backward()
    sync.finish([1.0])


def statistics_and_predictions_see_whole_weights(dist: Dist) -> None:
    objective, sync = Tiny(), WAYS["fsdp"]()
    sync.wrap(objective, dist)
    for value in (1.0, 2.0):
        for share in sync.parameters.values():
            share.data.fill_(value)
        with torch.no_grad():
            assert objective.statistics({"x": torch.ones(5)}, None, None)["whole"] == 25 * value
            assert objective.predict({}).metrics["sum"][0] == 5 * value, "fetched anew"
    mixed = Tiny()
    mixed.model["spare"].data = mixed.model["spare"].data.double()
    with pytest.raises(ConfigError, match=r"^sync=fsdp: splits parameters of one type"):
        WAYS["fsdp"]().wrap(mixed, dist)


def compiled_nets_train_alike(dist: Dist) -> None:
    """Compiled in place, inside of whatever is around it."""
    one = Run(language_model(), AllReduce(), ALONE)
    runs = [Run(language_model(), WAYS[way](), dist) for way in ("allreduce", "ddp", "fsdp")]
    for run in runs:
        run.objective.compile_net()
    for run, parts in ((one, 1), *((run, 2) for run in runs)):
        for step in range(3):
            run.step(step, parts)
        torch.testing.assert_close(run.losses, one.losses, rtol=0, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 3


def main() -> None:
    dist = distributed.start(device="cpu", timeout_s=60)
    try:
        if "compiled" in sys.argv:
            compiled_nets_train_alike(dist)
            return
        gradients_that_are_not_finite_are_named(dist)
        statistics_and_predictions_see_whole_weights(dist)
        language_models_train_alike(dist)
        shares_are_small(dist)
        parameters_may_be_left_out(dist)
    finally:
        distributed.stop()


if __name__ == "__main__":
    sys.exit(main())
