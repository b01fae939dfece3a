"""Each law, broken by a user's own source or objective, is one line of lines.txt."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from contract import Batch, Context, Dropout, Noise, Objective, Prediction, RunLength, Spec, StepOut
from data.decomposition.features import FeatureSpec
from tests.ranks import ROOT
from trial.objective import try_objective
from trial.predictions import check_prediction
from trial.source import try_source
from utils.errors import ConfigError

LINES = (ROOT / "tests" / "trial" / "lines.txt").read_text()
GUIDE = (ROOT / "docs" / "your-own-code.md").read_text()
SHARDS, ROWS = 4, 6


class MySource:
    spec = FeatureSpec(num_features=3)
    length = RunLength(10, SHARDS * ROWS)

    def train_batch(self, step: int, shard: int) -> dict[str, np.ndarray]:
        draws = np.random.default_rng([0, step, shard])
        return {"inputs": self.draw(draws), "labels": draws.integers(0, 2, ROWS)}

    def draw(self, draws: np.random.Generator) -> np.ndarray:
        return draws.random((ROWS, 3), dtype=np.float32)


class MyObjective(Objective):
    def forward(self, batch: Batch, carry: Any, ctx: Context) -> StepOut:
        losses_B = F.cross_entropy(self.model(batch["inputs"]), batch["labels"], reduction="none")
        return self.out(losses_B, ctx)

    def out(self, losses_B: Tensor, ctx: Context) -> Any:
        weight = torch.tensor(len(losses_B))
        return StepOut(losses_B.sum(), weight, {"loss": (losses_B.detach().sum(), weight)})


def named(kind: type, name: str) -> type:
    """As if it stood in models/mine.py or data/mine.py."""
    kind.__qualname__ = name
    kind.__module__ = "data.mine" if "Source" in name else "models.mine"
    return kind


def check(
    source: type = MySource,
    objective: type[Objective] = MyObjective,
    net: Callable[[], nn.Module] = lambda: nn.Linear(3, 2),
    rows: int = ROWS,
) -> None:
    made = named(source, "MySource")()
    torch.manual_seed(0)
    model = named(objective, "MyObjective")(net())

    def make_batch(shards: Any) -> tuple[Batch, Context]:
        batches = [made.train_batch(0, shard) for shard in shards]
        batch = {
            name: torch.from_numpy(np.concatenate([b[name][:rows] for b in batches]))
            for name in batches[0]
        }
        return batch, Context(0.0, Noise(0, 0, shards))

    try_source(made, SHARDS, 1, torch.device("cpu"))
    try_objective(model, make_batch, SHARDS, range(1, 3))


class Unseeded(MySource):
    def draw(self, draws: np.random.Generator) -> np.ndarray:
        return np.random.default_rng().random((ROWS, 3), dtype=np.float32)


class GlobalNumbers(MySource):
    def draw(self, draws: np.random.Generator) -> np.ndarray:
        random.random()
        return super().draw(draws)


class SeedsFirst(MySource):
    """For somebody else's function, which draws from a global generator."""

    def draw(self, draws: np.random.Generator) -> np.ndarray:
        np.random.seed(draws.integers(1 << 31))  # noqa: NPY002
        return np.random.rand(ROWS, 3).astype(np.float32)  # noqa: NPY002


class WholeBatch(MySource):
    """Every shard gets the batch of all."""

    def train_batch(self, step: int, shard: int) -> dict[str, np.ndarray]:
        shards = [MySource.train_batch(self, step, each) for each in range(SHARDS)]
        return {name: np.concatenate([each[name] for each in shards]) for name in shards[0]}


class NoLabels(MySource):
    def train_batch(self, step: int, shard: int) -> dict[str, np.ndarray]:
        return {"inputs": super().train_batch(step, shard)["inputs"]}


class Mean(MyObjective):
    def out(self, losses_B: Tensor, ctx: Context) -> Any:
        return StepOut(losses_B.mean(), torch.tensor(1), {})


class Counted(nn.Linear):
    """A net with state that no carry holds."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Backbone(nn.Module):
    """A part with dropout, built in evaluation mode as `from_pretrained` does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1)).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class StillBackbone(Backbone):
    """The same, kept in evaluation mode."""

    def train(self, mode: bool = True) -> StillBackbone:
        super().train(mode)
        self.body.eval()
        return self


class FrozenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


class CountingCalls(nn.Linear):
    """Its own schedule, by a counter that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x) * min(1, self.steps / 100)


class OwnGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.draws = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.draws))


class NewBuffer(nn.Linear):
    """Its running mean is another tensor after each pass."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("running", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
        return super().forward(x)


class DataBuffer(NewBuffer):
    def forward(self, x: Tensor) -> Tensor:
        self.running.data.mul_(0.9).add_(x.detach().mean(0))
        return nn.Linear.forward(self, x)


class Teacher(nn.Module):
    """BYOL's, which follows the student whenever that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.01)
        return self.student(x) - self.teacher(x)


class Normed(nn.Linear):
    """By the spectral norm, in the way that the law's line gives."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / torch.linalg.matrix_norm(self.weight, 2))


class ListCarry(MyObjective):
    def out(self, losses_B: Tensor, ctx: Context) -> Any:
        return replace(super().out(losses_B, ctx), carry={"seen": object()})


class MeanCarry(MyObjective):
    def out(self, losses_B: Tensor, ctx: Context) -> Any:
        mean = losses_B.detach().mean().expand(len(losses_B))
        return replace(super().out(losses_B, ctx), carry={"mean": mean})


class SharedCarry(MyObjective):
    def out(self, losses_B: Tensor, ctx: Context) -> Any:
        return replace(super().out(losses_B, ctx), carry={"mean": losses_B.detach().mean()})


class Hooked(nn.Linear):
    """Its gradient is made as long in every pass."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.weight.register_hook(lambda grad: grad / grad.norm())


class FloatMetric(MyObjective):
    def out(self, losses_B: Tensor, ctx: Context) -> Any:
        return StepOut(losses_B.sum(), torch.tensor(len(losses_B)), {"loss": 0.5})


class Detached(MyObjective):
    def out(self, losses_B: Tensor, ctx: Context) -> Any:
        return super().out(losses_B.detach(), ctx)


class Pair(MyObjective):
    def out(self, losses_B: Tensor, ctx: Context) -> Any:
        return losses_B.sum(), len(losses_B)


class PlacedRows(MyObjective):
    """Embeddings of all rows, as InfoNCE needs them, which half of the rows do not fill."""

    def statistics(self, batch: Batch, carry: Any, ctx: Context) -> dict[str, Tensor]:
        return {"embeddings": self.model(batch["inputs"])}


BROKEN = {
    "unseeded": {"source": Unseeded},
    "global numbers": {"source": GlobalNumbers},
    "dropout": {"net": lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))},
    "labels": {"source": NoLabels},
    "mean": {"objective": Mean},
    "batch norm": {"net": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))},
    "state": {"net": Counted},
    "the whole batch": {"source": WholeBatch},
    "evaluation mode": {"net": Backbone},
    "counter": {"net": CountingCalls},
    "own generator": {"net": OwnGenerator},
    "new buffer": {"net": NewBuffer},
    "buffer through data": {"net": DataBuffer},
    "spectral norm": {"net": lambda: parametrizations.spectral_norm(nn.Linear(3, 2))},
    "its former way": {"net": lambda: nn.utils.spectral_norm(nn.Linear(3, 2))},
    "teacher": {"net": Teacher},
    "carry": {"objective": ListCarry},
    "carry of a mean": {"objective": MeanCarry},
    "carry of no rows": {"objective": SharedCarry},
    "gradient": {"net": Hooked},
    "metric": {"objective": FloatMetric},
    "tuple": {"objective": Pair},
    "detached": {"objective": Detached},
    "placed rows": {"objective": PlacedRows},
}


@pytest.mark.parametrize("rows", [1, 2, 5, ROWS])
def test_what_keeps_the_laws_passes(rows: int) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), Dropout(0.5), nn.Linear(8, 2))

    check(net=net, rows=rows)


def test_a_net_may_divide_by_its_spectral_norm() -> None:
    check(net=lambda: Normed(3, 2))


def test_a_batch_may_seed_a_global_generator_before_it_draws() -> None:
    check(source=SeedsFirst)


@pytest.mark.parametrize("net", [StillBackbone, FrozenNorm])
def test_parts_that_stay_in_evaluation_mode_pass(net: Callable[[], nn.Module]) -> None:
    check(net=net)


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_law_is_the_line_that_the_guide_shows(law: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(**BROKEN[law])
    assert "\n" not in str(refused.value)
    assert str(refused.value) in " ".join(LINES.split())


def test_the_guide_quotes_lines_as_they_are() -> None:
    (quoted,) = re.findall(r"```text\n([a-z]+\.mine\..*?)```", GUIDE, re.DOTALL)
    for line in quoted.replace("\n  ", " ").splitlines():
        assert line in " ".join(LINES.split())


def test_predictions_have_sums_and_counts() -> None:
    objective = MyObjective(nn.Linear(3, 2))
    check_prediction(objective, Prediction({"accuracy": (0, 0)}))
    with pytest.raises(ConfigError, match=r"MyObjective.predict: metric accuracy counts 2 in"):
        check_prediction(objective, Prediction({"accuracy": (torch.tensor(1), torch.tensor(2))}))
    with pytest.raises(ConfigError, match=r"MyObjective.predict: metric accuracy is a float"):
        check_prediction(objective, Prediction({"accuracy": 0.5}))  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"MyObjective.predict: returns a Tensor of shape \[1\]"):
        check_prediction(objective, torch.zeros(1))


def test_dropout_depends_on_step_shard_and_layer_alone() -> None:
    net = nn.Sequential(Dropout(0.5), Dropout(0.5))
    objective, x = MyObjective(net), torch.ones(8, 5)
    together = Noise(0, 3, [4, 5])
    objective._forward_pre_hooks[next(iter(objective._forward_pre_hooks))](
        objective, ({}, None, Context(0.0, together))
    )
    both = [layer(x) for layer in net]
    assert not torch.equal(both[0], both[1])
    assert {*both[0].unique().tolist()} == {0.0, 2.0}
    for number, shard in enumerate((4, 5)):
        net[0].noise = Noise(0, 3, [shard])
        assert_close(net[0](x[:4]), both[0][4 * number : 4 * number + 4], rtol=0, atol=0)
    assert torch.equal(net.eval()(x), x)


def test_a_line_of_research_adds_facts_and_a_missing_one_is_one_line() -> None:
    with pytest.raises(ConfigError, match="the net needs `channels`, which boards does not have"):
        _ = Spec(name="boards").channels
