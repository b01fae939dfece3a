"""Language models end to end: the same run at any number of ranks, what a prompt becomes, and
Llama's folders in and out.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import ROOT, run_ranks
from tests.runs import (
    EXACT,
    QUIET,
    TINY_GPT,
    Result,
    assert_same_run,
    digest,
    learned,
    stopped,
    train,
)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A tiny language model on one rank."""
    return train(tmp_path_factory.mktemp("gpt") / "run", *TINY_GPT, "ema=true", "ema_rate=0.9")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_number_of_ranks_and_micro_batches_changes_nothing(
    ranks: int, gpt: Result, tmp_path: Path
) -> None:
    other = train(
        tmp_path / "run", *TINY_GPT, "ema=true", "ema_rate=0.9", "micro_batch_size=3", ranks=ranks
    )
    assert_same_run(gpt, other)
    losses = gpt.series("train/loss")
    assert losses[-1] < losses[0] - 1, "it learns nothing: the test shows little"
    for loss, bits in zip(gpt.series("eval/loss"), gpt.series("eval/bpb"), strict=True):
        assert bits == pytest.approx(loss / math.log(2), rel=2e-2), (
            "bytes, and hardly a token that begins a file"
        )


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["data.documents=true"]], ids=["plain", "documents"])
def test_exact_runs_are_equal_to_the_bit_and_go_on_at_other_ranks(
    more: list[str], tmp_path: Path
) -> None:
    arguments = [*TINY_GPT, *EXACT, "log_interval=4", *more]
    one = train(tmp_path / "one", *arguments)
    stopped(tmp_path / "run", *arguments, ranks=4)
    again = train(tmp_path / "run", *arguments, ranks=2)
    assert digest(again.directory) == digest(one.directory)
    assert learned(again) == learned(one)


@pytest.mark.slow
def test_a_prompt_is_continued_and_the_weights_travel_as_llamas(
    gpt: Result, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    asked = ["eval_only=true", "data.prompt=def ", "data.temperature=0", "data.max_new_tokens=12"]
    # the rest is the run's own
    shown = train(tmp_path / "asked", f"checkpoint={gpt.directory}", *asked).stdout
    (text,) = [line for line in shown.splitlines() if line.startswith("def ")]

    command = [sys.executable, "-m", "models.llama", str(gpt.directory), str(tmp_path / "llama")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"{tmp_path}/llama: averaged weights of step 23, ")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    tokens = torch.tensor([[256, *b"def "]])
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat((tokens, theirs(tokens).logits[:, -1].argmax(-1, keepdim=True)), 1)
    expected = bytes(token for token in tokens[0].tolist() if token < 256).decode(errors="replace")
    assert expected.startswith(text.rstrip("�")[:8]) or text.startswith(expected.rstrip("�")[:8])

    begun = train(
        tmp_path / "begun", *TINY_GPT, f"init_from={tmp_path}/llama", "max_steps=1", "lr=0"
    )
    assert begun.series("eval/loss")[0] == pytest.approx(gpt.series("eval/loss")[-1], abs=1e-5)
    (refused,) = run_ranks(
        1,
        ["pretrain.py", *TINY_GPT, *QUIET, f"init_from={tmp_path}/llama", "arch.kv_heads=2"],
        timeout=60,
    )
    assert refused.returncode == 2
    assert (
        refused.stderr
        == f"error: init_from={tmp_path}/llama: holds another net; add arch.kv_heads=1\n"
    )
