"""What people install resumes as the same run, or is refused before the first step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim import builtin
from optim.optimizer_state import VALUES, OptimizerState, swapping, weights_to_evaluate
from optim.schedule import set_lr
from tests.ranks import Completed, assert_one_line, check_ended_well, run_module
from tests.ranks_installed_optimizers import KINDS, build
from tests.runs import EXACT, QUIET, TINY_CNN, Result, digest
from trial.optimizers import remembered, try_optimizers
from utils.errors import ConfigError

STEPS = 7
TRAINABLE = sorted(KINDS.keys() - {"lbfgs"})
CONFIG = [{"match": ".*", "optimizer": {"_target_": "optim.builtin.sgd"}}]
DIGITS = [*TINY_CNN, *EXACT, "optim=sgd", "max_steps=6", "lr=0.01", "num_workers=0"]


class Training:
    """A few parameters, their optimizer and its state."""

    def __init__(self, kind: str) -> None:
        draws = torch.Generator().manual_seed(0)
        shapes = {"a.weight": (5, 3), "a.bias": (5,), "conv.weight": (2, 3, 2, 2)}
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, generator=draws))
            for name, shape in shapes.items()
        }
        self.optimizer = build(kind, self.parameters.items(), 0.05)
        for group in self.optimizer.param_groups:
            group["base_lr"] = 0.05
        self.state = OptimizerState([self.optimizer], self.parameters)
        for swapped in swapping([self.optimizer]):
            swapped.train()

    def steps(self, first: int, stop: int) -> None:
        for step in range(first, stop):
            draws = torch.Generator().manual_seed(step)
            for parameter in self.parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=draws)
            set_lr([self.optimizer], 1 / (step + 1))
            self.optimizer.step()

    def held(self) -> dict[str, Tensor]:
        every = {**self.state.state(), **self.parameters}
        return {name: tensor.detach().clone() for name, tensor in every.items()}


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes(), name


@pytest.mark.parametrize("kind", [*TRAINABLE, *(f"plain {kind}" for kind in TRAINABLE)])
@pytest.mark.parametrize("half", [0, 3])
def test_a_restored_optimizer_goes_on_to_the_bit(kind: str, half: int) -> None:
    torch.manual_seed(0)
    straight = Training(kind)
    straight.steps(0, half)
    saved = straight.held()
    straight.steps(half, STEPS)

    torch.manual_seed(0 if half == 0 else 1)  # nothing of a generator is in a checkpoint
    resumed = Training(kind)
    state = {name: tensor for name, tensor in saved.items() if name not in resumed.parameters}
    assert resumed.state.expected(state, half).keys() == state.keys()
    resumed.state.load(state)
    with torch.no_grad():
        for name, parameter in resumed.parameters.items():
            parameter.copy_(saved[name])
    for swapped in swapping([resumed.optimizer]):
        swapped.train()
    resumed.steps(half, STEPS)
    assert_same_bits(straight.held(), resumed.held())


def test_hyper_parameters_come_from_the_configuration() -> None:
    """Only what an optimizer has changed is saved of its groups."""
    training = Training("counter")
    training.steps(0, 2)
    values = bytes(training.state.state()[f"0/{VALUES}"].tolist()).decode()
    assert '["calls", 2]' in values
    assert "lr" not in values


def test_a_state_that_no_checkpoint_can_hold_is_one_line() -> None:
    training = Training("counter")
    training.optimizer.state[training.parameters["a.bias"]]["draws"] = torch.Generator()
    line = r"^optim.dense\[0\].optimizer: keeps a Generator as .*a.bias/draws, which no"
    with pytest.raises(ConfigError, match=line):
        training.state.state()


def test_evaluating_leaves_the_weights_that_train_as_they_are() -> None:
    training = Training("schedulefree")
    training.steps(0, 3)
    before = training.held()
    with weights_to_evaluate([training.optimizer], training.parameters):
        during = training.held()
    assert not torch.equal(before["a.weight"], during["a.weight"])
    assert_same_bits(before, training.held())
    training.steps(3, 4)  # in training mode again


def tried(kind: str, splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def sgd(params):
        return build(kind, params, 0.05)

    sgd.__module__ = builtin.__name__
    monkeypatch.setattr(builtin, "sgd", sgd)
    parameters = {name: nn.Parameter(torch.ones(50, 40)) for name in ("one", "other")}
    parameters["bias"] = nn.Parameter(torch.ones(50))
    try_optimizers(CONFIG, parameters, splits)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_what_works_passes_the_trial(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(kind, False, monkeypatch)


NEED_WHOLE = {
    "adafactor", "prodigy", "counter", "orthogonal", "preconditioned", "random start", "lookahead",
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINABLE)
def test_ranks_with_shares_take_what_works_by_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind not in NEED_WHOLE:
        return tried(kind, True, monkeypatch)
    with pytest.raises(ConfigError, match=r"^sync=fsdp: \w+ needs whole parameters"):
        tried(kind, True, monkeypatch)


def test_an_optimizer_with_a_closure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^optim.dense: LBFGS wants a closure"):
        tried("lbfgs", False, monkeypatch)
    with pytest.raises(ConfigError, match=r"^optim.dense: LBFGS wants a closure"):  # as plan does
        remembered(CONFIG, {"weight": nn.Parameter(torch.ones(50, 40))})


class OwnRate(torch.optim.SGD):
    """Lowers its rate itself, as with a scheduler that it steps."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["lr"] *= 0.9


def test_an_optimizer_that_sets_its_rate_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run would set it back before each step."""
    monkeypatch.setattr("optim.groups.make", lambda entry, key, named: OwnRate(named, lr=0.1))
    with pytest.raises(ConfigError, match=r"^optim.dense: OwnRate sets its own lr .*schedule"):
        try_optimizers(CONFIG, {"weight": nn.Parameter(torch.ones(5, 4))}, False)


def run(kind: str, directory: Path, *arguments: str, ranks: int = 1) -> list[Completed]:
    path = f"checkpoint_path={directory}"
    given = [kind, *DIGITS, *QUIET, "trial=true", path, *arguments]
    return run_module(ranks, "tests.ranks_installed_optimizers", *given, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain schedulefree", "prodigy", "counter", "preconditioned"])
def test_a_run_with_it_is_the_same_run(kind: str, tmp_path: Path) -> None:
    """Evaluated in between, on two ranks, and resumed; its evaluation alone gives the metrics."""
    often = ["eval_every_steps=2", "checkpoint_interval=3", "keep=null"]
    check_ended_well(run(kind, tmp_path / "one", *often))
    check_ended_well(run(kind, tmp_path / "two", ranks=2))
    from_3 = f"resume={tmp_path}/one/checkpoints/step_3"
    check_ended_well(run(kind, tmp_path / "resumed", from_3))
    only = ["eval_only=true", f"checkpoint={tmp_path}/one"]
    check_ended_well(run(kind, tmp_path / "only", *only))
    assert len({digest(tmp_path / name) for name in ("one", "two", "resumed")}) == 1
    results = [Result(tmp_path / name) for name in ("one", "two", "resumed", "only")]
    assert len({each.series("eval/accuracy")[-1] for each in results}) == 1


@pytest.mark.slow
def test_a_run_with_shares_refuses_what_needs_whole_parameters(tmp_path: Path) -> None:
    done = run("adafactor", tmp_path / "run", "sync=fsdp", "exact=false", ranks=2)
    assert_one_line(done, "sync=fsdp: Adafactor needs whole parameters")
    assert not (tmp_path / "run").exists()
