"""Tests that need a GPU: the same numbers as elsewhere, the same bits again, and every way to start
and resume.

Without a GPU they are skipped, or run on the CPU where `REHEARSED_ON` says so: the same code, as
far as it goes.
"""

import os
from pathlib import Path

import pytest
import torch

from contract import Context, Noise
from models import documents
from optim.sparse_signsgd import sum_duplicates
from tests.models.recursive.test_golden import NAMES, Recording, evaluation, six_steps
from tests.ranks import run_ranks
from tests.runs import (
    EXACT,
    FLOAT32,
    INTERRUPTED,
    QUIET,
    TINY_CNN,
    TINY_TRM,
    Result,
    assert_same_bits,
    assert_same_run,
    digest,
    faulty,
    learned,
    status,
    stopped,
    torchrun,
    train,
)
from utils.plan.attempts import largest_that_fits

DEVICE = "cuda" if torch.cuda.is_available() else os.environ.get("REHEARSED_ON", "")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not DEVICE, reason="no CUDA device here")]
only_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="it is the GPU's own")
HERE = [f"device={DEVICE}", "compile=false"]
CASES = {
    "trm": [*TINY_TRM, *EXACT, "max_steps=12"],
    "trm, bfloat16": [*TINY_TRM, "exact=true", "arch.forward_dtype=bfloat16", "max_steps=12"],
    "cnn, bfloat16": [*TINY_CNN, "exact=true", "arch.forward_dtype=bfloat16", "max_steps=12"],
}
LOOSER = 10.0  # a GPU's kernels add in other orders than a processor's


@pytest.fixture(autouse=True)
def whole_float32() -> None:
    """Other tests may have turned TF32 on."""
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", NAMES)
def test_golden_training(name: str) -> None:
    six_steps(Recording(f"steps_{name}", DEVICE, LOOSER))


@pytest.mark.parametrize("name", [*NAMES, *(f"steps_{name}" for name in NAMES)])
def test_golden_evaluation(name: str) -> None:
    evaluation(Recording(name, DEVICE, LOOSER), name)


@pytest.mark.parametrize("name", NAMES)
def test_golden_in_bfloat16(name: str) -> None:
    recorded = Recording(f"steps_{name}", DEVICE, forward_dtype="bfloat16")
    recorded.load("init")
    batch, objective = recorded.batch(0), recorded.objective.train()
    out = objective(
        batch, objective.initial_carry(batch), Context(0.0, Noise(0, 0, [0], recorded.device))
    )
    (out.loss / recorded.rows).backward()
    assert out.loss.item() == pytest.approx(float(recorded.data["step0/loss_sum"]), rel=0.02)
    grads = [
        (p.grad.cpu(), torch.tensor(recorded.data[f"step0/grad/{key}"]))
        for key, p in objective.named_parameters()
    ]
    off, norm = (
        torch.stack([tensor.norm() for tensor in kind]).norm()
        for kind in ([a - b for a, b in grads], [b for _, b in grads])
    )
    assert off / norm < 0.15


def test_noise_and_sums_have_the_bits_of_a_processor() -> None:
    here, there = (Noise(7, 3, [0, 5], torch.device(device)) for device in (DEVICE, "cpu"))
    for draw in (
        lambda noise: noise.uniform("a", (64, 9)),
        lambda noise: noise.integers("b", (64,), 2, 17),
    ):
        assert torch.equal(draw(here).cpu(), draw(there))
    torch.testing.assert_close(
        here.normal("c", (64,)).cpu(), there.normal("c", (64,)), rtol=0, atol=3e-6
    )
    ids, grads = there.integers("ids", (1000,), 0, 40), there.normal("grads", (1000, 32))
    for mine, theirs in zip(
        sum_duplicates(ids.to(DEVICE), grads.to(DEVICE)), sum_duplicates(ids, grads), strict=True
    ):
        assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("case", CASES)
def test_exact_has_the_same_bits_twice_and_at_two_ranks_on_one_card(
    case: str, tmp_path: Path
) -> None:
    """Every operation takes its deterministic kernel, or says that it has none."""
    if "cnn" in case:
        pytest.importorskip("sklearn")
    one, again = (train(tmp_path / name, *CASES[case], *HERE) for name in ("one", "again"))
    two = train(tmp_path / "two", *CASES[case], *HERE, "backend=gloo", ranks=2)
    assert digest(one.directory) == digest(again.directory) == digest(two.directory)
    assert learned(one) == learned(two)


def test_exact_has_the_same_bits_compiled(tmp_path: Path) -> None:
    one, two = (
        train(tmp_path / name, *CASES["trm, bfloat16"], HERE[0], "compile=true", timeout=200)
        for name in ("one", "two")
    )
    assert digest(one.directory) == digest(two.directory)


def test_torchrun_with_the_devices_own_backend_is_the_same_run(tmp_path: Path) -> None:
    one = train(tmp_path / "one", *CASES["trm"], *HERE)
    backend = "backend=nccl" if DEVICE == "cuda" else "backend=gloo"
    done = torchrun(1, *CASES["trm"], *HERE, *QUIET, backend, f"checkpoint_path={tmp_path}/two")
    assert done.returncode == 0, done.stderr
    assert digest(one.directory) == digest(tmp_path / "two")


@only_cuda
def test_nccl_refuses_ranks_that_share_a_card(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("each rank has its own card")
    path = f"checkpoint_path={tmp_path}/run"
    done = run_ranks(2, ["pretrain.py", *TINY_TRM, *QUIET, *HERE, "backend=nccl", path])
    assert {rank.returncode for rank in done} == {2}
    assert "backend=nccl: ranks 0 and 1 are on one GPU" in done[0].stderr


def test_a_stopped_run_goes_on_to_the_undisturbed_digest(tmp_path: Path) -> None:
    arguments = [*INTERRUPTED, "exact=true", *HERE]
    undisturbed = train(tmp_path / "undisturbed", *arguments)
    stopped(tmp_path / "run", *arguments)
    assert_same_bits(train(tmp_path / "run", *arguments), undisturbed)


def test_micro_batches_change_nothing(tmp_path: Path) -> None:
    """In float64, as elsewhere; `auto` tries what fits."""
    arguments = [*TINY_TRM, *HERE, "max_steps=24"]
    one = train(tmp_path / "one", *arguments)
    for asked in ("auto", "6"):
        assert_same_run(one, train(tmp_path / asked, *arguments, f"micro_batch_size={asked}"))


@only_cuda
def test_what_does_not_fit_is_halved() -> None:
    free, held = torch.cuda.mem_get_info()[0], []

    def attempt(size: int) -> None:
        held[:] = [torch.empty(size * (free // 3), dtype=torch.uint8, device="cuda")]

    try:
        assert largest_that_fits(8, attempt, (), "one") == 2
    finally:
        held.clear()
        torch.cuda.empty_cache()


def test_compiled_computes_what_eager_does(tmp_path: Path) -> None:
    arguments = [*TINY_TRM, *FLOAT32, HERE[0], "max_steps=8"]
    eager = train(tmp_path / "eager", *arguments, "compile=false")
    compiled = train(tmp_path / "compiled", *arguments, "compile=true", timeout=200)
    assert compiled.series("train/loss")[:3] == pytest.approx(
        eager.series("train/loss")[:3], rel=0.01
    )


@only_cuda
def test_attention_within_documents_is_that_of_a_mask() -> None:
    documents.load_kernel()
    if not documents.suits_kernel(torch.device(DEVICE), 512, 4, torch.bfloat16, 64):
        pytest.skip("this card or this PyTorch has no varlen_attn")
    torch.manual_seed(0)
    inputs = torch.randn(4, 3, 512, 4, 64, device=DEVICE).bfloat16().transpose(2, 3)
    starts = torch.tensor([[0, 100, 101, 400], [0, 512, 512, 512], [0, 1, 2, 511]], device=DEVICE)
    documents_BL = (torch.arange(512, device=DEVICE) >= starts[:, :, None]).sum(1)
    seen = documents.within(documents_BL, 4, torch.bfloat16, 64)
    assert isinstance(seen, documents.Packed)
    mask = (documents_BL[:, :, None] == documents_BL[:, None, :]).tril()[:, None]
    results = []
    for packed in (True, False):
        kind = torch.bfloat16 if packed else torch.float32
        query, key, value = (x.to(kind).requires_grad_() for x in inputs[:3].clone())
        mixed = (
            documents.attention_packed(query, key, value, seen)
            if packed
            else torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
        )
        mixed.backward(inputs[3].to(kind))
        results.append((mixed, query.grad, key.grad, value.grad))
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine.float(), exact, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("policy", "code", "state"), [("raise", 1, "failed"), ("skip", 0, "finished")]
)
def test_a_step_that_is_not_finite_is_refused(
    policy: str, code: int, state: str, tmp_path: Path
) -> None:
    (done,) = faulty(
        tmp_path / "run",
        "nan@objective",
        0,
        2,
        *TINY_TRM,
        *HERE,
        "max_steps=5",
        f"on_nonfinite={policy}",
    )
    assert done.returncode == code, done.stderr
    assert "the gradient is not finite, first seen in model." in done.stdout + done.stderr
    assert status(tmp_path / "run")["state"] == state
    if policy == "skip":
        assert Result(tmp_path / "run").weights()["model.inner.lm_head.weight"].isfinite().all()
