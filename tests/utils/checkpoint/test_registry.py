"""A checkpoint that does not fit a run is refused before anything of it is taken; what is said of
one that does.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runs import FLOAT32, TINY_TRM, digest
from tests.steps import Stepped, steps_of, trainer_on
from tests.utils.checkpoint.helpers import declare
from utils.carries import flatten
from utils.checkpoint import reader, resume
from utils.checkpoint.resume import Start
from utils.checkpoint.writer import Writer
from utils.errors import ConfigError
from utils.ranks.distributed import Dist

LINE = [*TINY_TRM, *FLOAT32, "lr_warmup_steps=0", "lr_min_ratio=0.1", "max_steps=10"]


def trainer_in(folder: Path, *arguments: str) -> Stepped:
    return trainer_on(Dist(), folder, *LINE, *arguments)


def train(trainer: Stepped, steps: int) -> None:
    for take in steps_of(trainer, trainer.step + steps):
        take()
    trainer.sync.check_finite("raise", newest=True)


def save(trainer: Stepped, run: Path) -> Path:
    """Returns the folder of a new checkpoint."""
    writer = Writer(run / "checkpoints", Dist(), pytest.fail)
    writer.save(trainer.step, *trainer.saved.snapshot(trainer.progress()))
    assert writer.wait() == ""
    return run / "checkpoints" / f"step_{trainer.step}"


def restore(trainer: Stepped, checkpoint: Path) -> list[str]:
    """Goes on from a checkpoint; returns what is said of it."""
    said: list[str] = []
    start = Start(checkpoint, continues=True, meta=reader.read_meta(checkpoint))
    steps = trainer.total_steps
    resume.restore(start, trainer.saved, trainer.cfg, said.append, steps, trainer.lr_after)
    trainer.step = start.step
    return said


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run after three steps."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = trainer_in(folder)
    train(trainer, 3)
    return save(trainer, folder)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Stepped:
    return trainer_in(tmp_path_factory.mktemp("fresh") / "run")


@pytest.mark.parametrize("optim", ["adam_atan2", "muon", "sgd"])
def test_a_run_that_was_stopped_before_its_first_step_goes_on(optim: str, tmp_path: Path) -> None:
    """Optimizers remember nothing yet. tests/test_resume.py goes on from later steps."""
    runs = tmp_path / "one", tmp_path / "other"
    one, other = (trainer_in(run, f"optim={optim}") for run in runs)
    with torch.no_grad():
        for parameter in one.objective.parameters():
            parameter += 0.1
    assert restore(other, save(one, runs[0])) == []
    for steps in (0, 1):
        train(one, steps)
        train(other, steps)
        assert digest(save(one, runs[0])) == digest(save(other, runs[1]))


def changed(trained: Path, folder: Path, group: str, tensors: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint with these tensors in a group, and with a manifest that fits."""
    shutil.copytree(trained, folder)
    save_file(tensors, folder / f"{group}.safetensors")
    declare(folder)
    return folder


def test_a_carry_may_go_on_in_another_precision(trained: Path, tmp_path: Path) -> None:
    """As bfloat16 on a GPU and float32 on a CPU are."""
    tensors = load_file(trained / "shards.safetensors")
    rounded = {
        name: tensor.bfloat16() if "/carry/" in name and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    trainer = trainer_in(tmp_path / "mine")
    restore(trainer, changed(trained, tmp_path / "step_3", "shards", rounded))
    for name, tensor in flatten(trainer.carries[0]).items():
        shards = [rounded[f"{shard}/carry/{name}"] for shard in range(8)]
        assert torch.equal(tensor, torch.cat(shards).to(tensor.dtype))
        assert tensor.dtype == tensors[f"0/carry/{name}"].dtype


# a group, a tensor that is another there or, for None, missing, and what is said of it
HEAD, Z = "model.inner.lm_head.weight", "carry/state/0"
UNFIT: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("model", HEAD, None, f"model: {HEAD} is missing from it"),
    (
        "model",
        HEAD,
        torch.ones(6, 16).double(),
        f"model: {HEAD} is of torch.float64 there and of torch.float32 here",
    ),
    ("optimizer", "1/x/exp_avg", torch.ones(2, 3), "optimizer: it holds 1/x/exp_avg"),
    ("ema", "steps", None, "ema: steps is missing from it"),
    ("shards", f"0/{Z}", torch.ones(3, 4), "shard 0, carry: state/0 has shape (3, 4) there"),
    ("shards", "1/carry/more", torch.ones(1), "shard 1, carry: it holds more"),
    ("shards", "7/meter/loss", torch.ones(2).long(), "shard 7, meter: loss is of torch.int64"),
]


@pytest.mark.parametrize(("group", "name", "tensor", "problem"), UNFIT)
def test_what_does_not_fit_leaves_the_trainer_as_it_was(
    group: str,
    name: str,
    tensor: torch.Tensor | None,
    problem: str,
    trained: Path,
    fresh: Stepped,
    tmp_path: Path,
) -> None:
    tensors = load_file(trained / f"{group}.safetensors") | {name: tensor}
    there = {key: each for key, each in tensors.items() if each is not None}
    folder = changed(trained, tmp_path / "step_3", group, there)
    before = digest(save(fresh, tmp_path / "before"))
    with pytest.raises(ConfigError) as caught:
        restore(fresh, folder)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert fresh.step == 0
    assert digest(save(fresh, tmp_path / "after")) == before


def test_a_longer_run_says_how_the_learning_rate_jumps(trained: Path, tmp_path: Path) -> None:
    assert restore(trainer_in(tmp_path / "run", "max_steps=20"), trained) == [
        "the learning rate jumps at step 3 from 0.00814503 to 0.00950953, because the run has"
        " another length now"
    ]
