"""All that objectives and ways to synchronise may ask of the loop, in real runs with those of
ranks_unusual_objectives.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from data.source import source_of
from tests.ranks import Completed, assert_one_line, check_ended_well, run_module, words
from tests.ranks_unusual_objectives import HIDDEN, LogOfSum, Net
from tests.runs import QUIET, TINY_CNN, Result, config_of

slow = pytest.mark.slow
STEPS, LR = 5, 0.05
SGD = f"optim=sgd max_steps={STEPS} lr={LR} lr_warmup_steps=0 weight_decay=0.1 num_workers=0"
DIGITS = [*TINY_CNN, *words(SGD)]
FLOAT32 = "arch.forward_dtype=float32"


def run(
    what: str,
    directory: Path,
    *arguments: str,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
) -> list[Completed]:
    module, path = "tests.ranks_unusual_objectives", f"checkpoint_path={directory}"
    return run_module(ranks, module, what, *DIGITS, *QUIET, path, *arguments, timeout=120, env=env)


def trained(what: str, directory: Path, *arguments: str, ranks: int = 1) -> Result:
    return Result(
        directory, check_ended_well(run(what, directory, *arguments, ranks=ranks))[0].stdout
    )


def far(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of any weight."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of log(1 + Σ over the batch), all of it at once by autograd
    alone.
    """
    config = config_of(*DIGITS)
    source = source_of(config.plain())
    torch.manual_seed(config.seed)
    objective = LogOfSum(Net(source.spec)).double()
    optimizer = torch.optim.SGD(objective.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        shards = [source.train_batch(step, shard) for shard in range(8)]
        batch = {
            name: torch.cat([torch.from_numpy(shard[name]) for shard in shards])
            for name in shards[0]
        }
        loss = torch.log1p(objective.error(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(objective.state_dict())


@pytest.mark.parametrize(
    ("ranks", "micro"),
    [
        (2, 4),
        *(pytest.param(*case, marks=slow) for case in ((1, "null"), (1, 8), (3, 4), (3, "null"))),
    ],
)
def test_a_loss_of_the_whole_batch_has_its_gradient(
    reference, ranks: int, micro: int | str, tmp_path: Path
) -> None:
    """In one micro-batch per rank, and in four (of three ranks: in three or two)."""
    losses, weights = reference
    arguments = tmp_path / "run", f"micro_batch_size={micro}"
    result = trained("totals", *arguments, ranks=ranks)
    assert result.series("train/loss") == pytest.approx(losses, abs=1e-12)
    assert far(result.weights(), weights) < 1e-12


@slow
def test_prepare_comes_once_before_the_first_step(tmp_path: Path) -> None:
    """Averages begin with what it made, and no number of ranks changes that; a resumed run and an
    evaluation go without.
    """
    still = ["ema=true", "ema_rate=0.5", "lr=0"]
    one = trained("prepared", tmp_path / "one", *still)
    two = check_ended_well(run("prepared", tmp_path / "two", *still, ranks=2))
    assert all(out.count("PREPARED") == 1 for out in (one.stdout, *(r.stdout for r in two)))
    weights, averages = one.weights(), one.weights("ema")
    assert far(weights, Result(tmp_path / "two").weights()) < 1e-12
    assert far({name: averages[f"dense/{name}"] for name in weights}, weights) < 1e-6
    assert far(weights, trained("plain", tmp_path / "plain", "lr=0").weights()) > 1e-3

    longer = trained("prepared", tmp_path / "one", *still, f"max_steps={STEPS + 2}")
    assert "PREPARED" not in longer.stdout
    assert far(longer.weights(), weights) == 0
    evaluated = trained(
        "prepared", tmp_path / "only", *still, "eval_only=true", f"checkpoint={tmp_path / 'two'}"
    )
    assert "PREPARED" not in evaluated.stdout
    assert evaluated.series("eval/accuracy") == Result(tmp_path / "two").series("eval/accuracy")


def frozen_file(path: Path, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(784, HIDDEN), nn.BatchNorm1d(HIDDEN))
    save_file(dict(net.state_dict()), path)
    return dict(net.state_dict())


@slow
def test_a_rank_with_another_file_is_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        frozen_file(tmp_path / f"{rank}.safetensors", rank)
    done = run(
        "half-frozen",
        tmp_path / "run",
        FLOAT32,
        ranks=2,
        env={"FROZEN": f"{tmp_path}/{{rank}}.safetensors"},
    )
    assert {rank.returncode for rank in done} == {2}
    said = done[0].stdout + done[0].stderr
    assert said.count(".safetensors: model.base of rank 1 differs from rank 0's") == 1, said


@pytest.mark.parametrize(
    ("what", "ranks", "line"),
    [
        ("mean", 1, "MeanError.forward: the loss of two shards is"),
        # ranks differ, but that is the symptom
        ("drawing", 2, "Drawing.train_batch: draws from the global generator of NumPy"),
    ],
)
def test_an_objective_that_would_break_the_promise_is_refused(
    what: str, ranks: int, line: str, tmp_path: Path
) -> None:
    done = run(what, tmp_path / "run", "trial=true", ranks=ranks)
    assert_one_line(done, line)
    assert not (tmp_path / "run").exists()


@slow
def test_what_sums_over_the_whole_batch_keeps_the_laws(tmp_path: Path) -> None:
    check_ended_well(run("totals", tmp_path / "run", "trial=true", ranks=2))
