"""sync=ddp and sync=fsdp: the same run as with allreduce, its checkpoints, and its faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs import (
    BOUND_S,
    TINY_CNN,
    TINY_GPT,
    TINY_TRM,
    Result,
    assert_same_run,
    faulty,
    seconds_since,
    status,
    stopped,
    train,
)

TRM = [*TINY_TRM, "grad_clip=1.0", "max_steps=30"]
CNN = [*TINY_CNN, "max_steps=24", "ema=true"]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def trm(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The tiny TRM on one rank."""
    return train(tmp_path_factory.mktemp("trm") / "run", *TRM)


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The digit classifier on one rank."""
    return train(tmp_path_factory.mktemp("cnn") / "run", *CNN)


@pytest.mark.parametrize(
    ("sync", "ranks", "more"),
    [
        ("fsdp", 2, ["micro_batch_size=3"]),
        pytest.param("ddp", 2, ["micro_batch_size=3", "sync.static_graph=true"], marks=slow),
        pytest.param("ddp", 4, [], marks=slow),
        pytest.param("ddp", 3, ["micro_batch_size=3"], marks=slow),
        pytest.param("fsdp", 1, [], marks=slow),
        pytest.param("fsdp", 3, [], marks=slow),
    ],
)
def test_trm_is_the_same_run(
    sync: str, ranks: int, more: list[str], trm: Result, tmp_path: Path
) -> None:
    assert_same_run(trm, train(tmp_path / "run", *TRM, f"sync={sync}", *more, ranks=ranks))


@slow
@pytest.mark.parametrize(("sync", "ranks"), [("ddp", 3), ("fsdp", 2)])
def test_cnn_is_the_same_run(sync: str, ranks: int, cnn: Result, tmp_path: Path) -> None:
    assert_same_run(
        cnn, train(tmp_path / "run", *CNN, f"sync={sync}", "micro_batch_size=4", ranks=ranks)
    )


@slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ["sync=ddp", "sync.find_unused_parameters=true", "micro_batch_size=3"]),
        (3, ["sync=fsdp", "sync.reshard_after_forward=false"]),
        # on a busy machine one rank may compile a minute longer than the other
        *((2, [f"sync={sync}", "compile=true", "timeout_s=300"]) for sync in ("ddp", "fsdp")),
    ],
)
def test_a_language_model_is_the_same_run(ranks: int, more: list[str], tmp_path: Path) -> None:
    """Embeddings tied, activations computed again; compiled or not."""
    line = [*TINY_GPT, "arch.tied=true", "arch.recompute=true", "grad_clip=0.5", "ema=true"]
    one = train(tmp_path / "one", *line)
    assert_same_run(one, train(tmp_path / "run", *line, *more, ranks=ranks, timeout=400))


@slow
def test_muon_gathers_its_matrices(tmp_path: Path) -> None:
    """Ranks hold rows of each matrix, and go on with those of a checkpoint."""
    line = [*TINY_GPT, "optim=muon"]
    whole = train(tmp_path / "whole", *line)
    stopped(tmp_path / "split", *line, "sync=fsdp", ranks=3)
    assert_same_run(whole, train(tmp_path / "split", *line, "sync=fsdp", ranks=2))


@slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp", 2), ("allreduce", 1)),
        (("allreduce", 2), ("fsdp", 4)),
        (("fsdp", 3), ("fsdp", 2)),
        (("allreduce", 2), ("allreduce", 3)),
    ],
)
def test_a_stopped_run_goes_on_in_another_way(
    before: tuple[str, int], after: tuple[str, int], trm: Result, tmp_path: Path
) -> None:
    """One format of checkpoints; what optimizers remember and averages are in it."""
    stopped(tmp_path / "run", *TRM, f"sync={before[0]}", ranks=before[1])
    again = train(tmp_path / "run", *TRM, f"sync={after[0]}", ranks=after[1])
    assert "continued at step 10" in (again.directory / "log.txt").read_text()
    assert_same_run(trm, again)
    remembered, expected = again.weights("optimizer"), trm.weights("optimizer")
    assert remembered.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(remembered[name], tensor, rtol=0, atol=1e-6)


@slow
@pytest.mark.parametrize("sync", ["ddp", "fsdp"])
def test_a_rank_that_hangs_ends_the_run(sync: str, tmp_path: Path) -> None:
    """The others wait for it inside of PyTorch."""
    done = faulty(
        tmp_path / "run", "hang@objective", 1, 13, *TRM, f"sync={sync}", "timeout_s=8", ranks=2
    )
    assert seconds_since(done) < 2 * BOUND_S
    assert all(rank.returncode for rank in done)
    assert status(tmp_path / "run")["state"] == "failed"


@slow
@pytest.mark.parametrize("sync", ["allreduce", "ddp", "fsdp"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_step_that_is_not_finite_is_refused_on_all_ranks(
    sync: str, policy: str, tmp_path: Path
) -> None:
    arguments = [*TINY_TRM, "max_steps=6", f"on_nonfinite={policy}", f"sync={sync}"]
    done = faulty(tmp_path / "run", "nan@objective", 1, 3, *arguments, ranks=2)
    text = done[0].stdout + done[0].stderr
    assert "the gradient is not finite, first seen in model.inner" in text
    assert {rank.returncode for rank in done} == ({1} if policy == "raise" else {0}), text
