"""Wrong input ends with one line that names key, value and fix, and with status 2, before anything slow happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import LAUNCHER_PREFIXES, ROOT, free_port, run_ranks

# what must be wrong before torch is imported: arguments, and what the line must say
QUICK = [
    (["lrr=1"], "lrr=1: unknown key; did you mean lr?"),
    (["arch.hiden_size=64"], "arch.hiden_size=64: unknown key; did you mean arch.hidden_size?"),
    (["+fooo=1"], "fooo=1: unknown key"),
    (["arch=hmr"], "arch=hmr: unknown; choose one of cnn, hrm, trm"),
    (["experiment=demos"], "experiment=demos: unknown; choose one of"),
    (["lr=fast"], "lr=fast: must be a number, for example 0.0001"),
    (["epochs=1.5"], "epochs=1.5: must be a whole number"),
    (["max_steps=ten"], "max_steps=ten: must be a whole number"),
    (["ema=7"], "ema=7: must be true or false"),
    (["compile=maybe"], "compile=maybe: choose one of auto, true, false"),
    (["wandb.mode=on"], "wandb.mode=on: choose one of auto, online, offline, disabled"),
    (["on_nonfinite=stop"], "on_nonfinite=stop: choose one of raise, skip"),
    (["global_batch_size=100"], "global_batch_size=100 is not a multiple of shards=8; try 104"),
    (["global_batch_size=0"], "global_batch_size=0: must be at least 1"),
    (["eval_interval=3"], "eval_interval=3 does not divide epochs=100000; try epochs="),
    (["micro_batch_size=5"], "micro_batch_size=5 is less than one shard of 96 examples"),
    (["data_path=a", "data_paths=[b]"], "data_path=a and data_paths=['b'] are both given"),
    (["eval_only=true"], "eval_only=true needs weights"),
    (["exact=true", "micro_batch_size=192"], "micro_batch_size=192: exact=true computes one shard at a time"),
    (["keep=0"], "keep=0: must be at least 1"),
    (["checkpoint_minutes=0"], "checkpoint_minutes=0.0: must be more than 0"),
    (["evaluators=[arc]"], "evaluators=['arc']"),
    (["~lr"], "lr: every key is needed"),
    (["wandb=online"], "wandb=online: must be a group of keys"),
    (["lr=nan"], "lr=nan: must be a number"),
    (["data.shards=4"], "data.shards=4: follows shards; set shards instead"),
    (["data_paths=[1]"], "data_paths=[1]: must be a list of folders"),
    (["data=mnist", "data_paths=[x]"], "data_paths=['x']: this data reads no such key"),
    (["arch.puzzle_emb_ndim=abc"], "arch.puzzle_emb_ndim=abc: must be a whole number"),
    (["+experiment=demos"], "experiment=demos: unknown; choose one of"),
    (["lr=1,2"], "lr=1,2: several values; add -m"),
    (["lr=="], "lr==: cannot be read"),
]
# what only the run itself can find out
SLOW = [
    (["device=tpu"], "device=tpu: choose auto, cpu or cuda"),
    (
        ["arch.loss.loss_type=hinge", "arch.hidden_size=16"],
        "arch.loss.loss_type=hinge: choose one of stablemax_cross_entropy, softmax_cross_entropy",
    ),
    (["arch.num_heads=7"], "arch.hidden_size=512 is not a multiple of arch.num_heads=7"),
    (["data_path=nowhere/x"], "data_path=nowhere/x: no train/dataset.json there"),
    (["arch=cnn"], "arch=cnn needs images of 28×28"),
    (["arch.num_heads=0"], "arch.num_heads=0 must be more than 0"),
    (["arch=cnn", "data=digits", "arch.dropout=[2.0,0.1]"], "arch.dropout=[2.0, 0.1]: two rates"),
    (
        ["objective_metric=eval/accurracy", "arch.hidden_size=16"],
        "objective_metric=eval/accurracy: not known here; choose from eval/accuracy",
    ),
    (["eval_save_outputs=[logit]", "arch.hidden_size=16"], "eval_save_outputs=logit: not known here"),
    (["arch._target_=optim.builtin.torch.load"], "arch._target_=optim.builtin.torch.load: comes from torch"),
    (["arch._target_=os.system"], "arch._target_=os.system: only things of this repository"),
]


def pretrain(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith((*LAUNCHER_PREFIXES, "RANK", "WORLD_SIZE"))}
    command = [sys.executable, str(ROOT / "pretrain.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def assert_one_line(done: subprocess.CompletedProcess[str], line: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: "), done.stderr
    assert line in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("arguments", "line"), QUICK, ids=[" ".join(arguments) for arguments, _ in QUICK])
def test_known_from_the_command_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    assert_one_line(pretrain(*arguments, cwd=tmp_path), line)
    assert not any(tmp_path.iterdir()), "nothing is written before the configuration is right"


@pytest.mark.parametrize(("arguments", "line"), SLOW, ids=[" ".join(arguments) for arguments, _ in SLOW])
def test_known_from_the_run(arguments: list[str], line: str, tmp_path: Path) -> None:
    assert_one_line(pretrain(*arguments, f"checkpoint_path={tmp_path}/run"), line)
    assert not (tmp_path / "run").exists()


def test_answers_before_importing_torch() -> None:
    code = "import sys; sys.argv = ['pretrain.py', 'lrr=1']; import pretrain\ntry: pretrain.main()\nfinally: pass"
    probe = f"import os; os._exit = lambda c: print('torch' in sys.modules, c)\n{code}"
    done = subprocess.run([sys.executable, "-c", "import sys\n" + probe], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["False", "2"], done.stderr


def test_cuda_that_is_absent_is_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert_one_line(pretrain("device=cuda", f"checkpoint_path={tmp_path}/run"), "device=cuda: PyTorch")


def test_a_damaged_dataset_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    meta = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 8, "seq_len": 4, "num_puzzle_identifiers": 1}
    (folder / "dataset.json").write_text(json.dumps(meta | {"total_groups": 1, "mean_puzzle_examples": 1, "sets": ["all"]}))
    np.save(folder / "all__inputs.npy", np.zeros((1, 4), np.uint8))
    done = pretrain(f"data_path={tmp_path}/set", f"checkpoint_path={tmp_path}/run")
    assert_one_line(done, f"data_path={tmp_path}/set")
    assert "all__" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "arguments", "line"), [(2, ["data_path=nowhere"], "data_path=nowhere"), (9, ["seed=1"], "shards=8 is less than the 9 ranks")]
)
def test_all_ranks_end_and_rank_0_speaks_first(ranks: int, arguments: list[str], line: str) -> None:
    started = time.monotonic()
    done = run_ranks(ranks, ["pretrain.py", *arguments, "timeout_s=60"], timeout=90)
    assert time.monotonic() - started < 60, "a rank waited for the timeout of a collective"
    assert {rank.returncode for rank in done} == {2}
    assert sum(rank.stderr.count("error") for rank in done) == 1, "one rank says it, once"
    assert line in done[0].stderr


def test_torchrun_shows_one_line_of_ours(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "pretrain.py"]
    done = subprocess.run([*command, "global_batch_size=100"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert done.stderr.count("error: global_batch_size=100") == 1
    assert "error on rank" not in done.stderr
