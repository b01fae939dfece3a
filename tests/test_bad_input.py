"""Wrong input ends with one line that names key, value and fix, and with status 2, before anything
slow happens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import ROOT, Completed, assert_one_line, run_line
from tests.runs import faulty, launched, torchrun

# arguments, the key that the line must name, and the number of ranks where not one
Row = tuple[list[str], str] | tuple[list[str], str, int]
TABLE: list[Row] = [
    (["lrr=1"], "lrr: unknown key; did you mean lr"),
    (["experiment=tms_5_2", "muon_lr=1"], "muon_lr: belongs to optim=muon"),
    (["--epochs=5"], "--epochs=5: keys are given without dashes; write epochs=5"),
    (["--elastic_gpu"], "--elastic_gpu: keys are given without dashes; write elastic_gpu=VALUE"),
    (["config.yaml"], "config.yaml: must be key=value", 2),
    (["arch.hiden_size=64"], "arch.hiden_size"),
    (["experiment=demos"], "experiment"),
    (["lr=fast"], "lr"),
    (["arch.hidden_size=true"], "arch.hidden_size=true: must be a valid integer"),
    (["arch.hidden_size=null"], "arch.hidden_size=null: must be"),
    (["arch.halt_exploration_prob=1.1"], "arch.halt_exploration_prob=1.1: must be less"),
    (["+data.embedded.siez=4"], "siez=4: unknown key; did you mean data.embedded.size"),
    (["global_batch_size=100"], "global_batch_size"),
    (["epochs=9", "eval_interval=4"], "try eval_interval=3 or epochs=12"),
    (["expected={metric: x, at: {5: 3}}"], "expected.at"),
    (["micro_batch_size=5"], "micro_batch_size"),
    (["eval_only=true"], "eval_only"),
    (["plan=auto", "micro_batch_size=96"], "micro_batch_size"),
    (["plan=auto", "plan_cards=8x80"], "plan_cards"),
    (["plan=show", "plan_cards=0x80"], "plan_cards"),
    (["exact=true", "sync=ddp"], "exact"),
    (["exact=true"], "exact=true on 3 ranks: with shards=8 it takes 1, 2, 4, 8 ranks", 3),
    (["sync=fsdp", "micro_batch_size=auto"], "micro_batch_size"),
    (["sync=fsdp", "micro_batch_size=96"], "micro_batch_size", 3),
    (["sync=ddp", "sync.bucket_mb=0.5"], "sync.bucket_mb"),
    (["exact=true", "micro_batch_size=1"], "micro_batch_size"),
    (["~lr"], "lr"),
    (["data_paths=[1]"], "data_paths"),
    (["arch=cnn", "puzzle_emb_lr=1"], "puzzle_emb_lr"),
    (["arch=prefix", "data=passages", "arch.latents=0"], "arch.latents"),
    (["data=mnist", "data_paths=[x]"], "data_paths"),
    (["lr=1,2"], "lr"),
    (
        ["data_path=p/ünï"],
        """data_path=p/ünï: cannot be read; where the value is a text, quote it: 'data_path="p/ü""",
    ),
    (["run_name=a (1)"], """quote it: 'run_name="a (1)"'"""),
    (['run_name=a="b"'], """quote it: 'run_name="a=\\"b\\""'"""),
    (
        ["arch=candidates", "arch.hidden_size=40", "arch.num_heads=null"],
        "arch.hidden_size=40: is not a multiple of 3",
    ),
    (["run_name="], "run_name"),
    (["run_name=a/../b"], "run_name"),
    (["project_name=../x"], "project_name"),
    (["checkpoint_path=.."], "checkpoint_path"),
    (["resume="], "resume"),
    (["checkpoint=", "eval_only=true"], "checkpoint"),
    (["data_path="], "data_path"),
    (["eval_save_outputs=[[a]]"], "eval_save_outputs"),
    (["arch=trm", "arch.mlp_t=${oc.env:HOME}"], "arch.mlp_t"),
    (["lr=${oc.env:NO_SUCH_VARIABLE}"], "'NO_SUCH_VARIABLE' not found"),
    (["lr=???"], "lr"),
    (["arch._target_=os.system"], "arch._target_"),
    (["arch._target_=models.trm.torch.load"], "arch._target_"),
    (["data._target_=data.build.sudoku.main"], "data._target_"),
    (
        ["optim.dense=[{match: '.*', optimizer: {_target_: optim.builtin.sgd, _partial_: true}}]"],
        "optim.dense[0].optimizer",
    ),
    (["+_target_=os.system"], "_target_"),
    (["arch=cnn", "arch.dropout=[[{_call_: 1}]]"], "arch.dropout[0]"),
    (["arch=cnn", "arch.dropout=[nan,0.1]"], "arch.dropout[0]"),
    (["shards=1000000000"], "shards"),
    (["--config-dir=/nope"], "config"),
    (["hydra/sweeper=optuna", "-m", "seed=0,1", "hydra.sweeper.trials=0"], "sweeper.trials: "),
    (
        ["hydra/sweeper=optuna", "-m", "lr=interval(0.1,1)", "hydra.sweeper.direction=maximize"],
        "hydra.sweeper.direction",
    ),
    (["hydra.job.chdir=true"], "hydra.job.chdir"),
    (["device=tpu"], "device"),
    (["arch.num_heads=7"], "arch.hidden_size"),
    (["arch.loss.loss_type=hinge"], "arch.loss.loss_type"),
    (["data_path=nowhere"], "data_path", 2),
    (["shards=8"], "shards=8 is less than the 9 ranks", 9),
    (["data_paths=[/,nowhere]"], "data_paths[1]"),
    (["resume=nowhere"], "resume"),
    (["eval_only=true", "checkpoint=nowhere"], "checkpoint"),
    (["checkpoint_path=/etc/passwd/x"], "checkpoint_path"),
    (["arch.hidden_size=16", "init_from=/"], "init_from"),
    (["arch.hidden_size=16", "resume=/"], "resume", 2),
    (["plan=show", "plan_cards=2x80+24"], "plan_cards=2x80+24: write a number of equal GPUs"),
    (["evaluators=[arc]"], "evaluators"),
    (["evaluators=[{name:arc@ARC,submission_K:3}]"], "evaluators"),
    (["data_path=/"], "data_path"),
    (["arch=cnn"], "arch"),
    (["arch=trm", "data=digits", "max_steps=1"], "arch"),
    (["arch=hrm", "data=tokens", "data.embedded.mebibytes=1"], "arch"),
    (["experiment=tms_5_2", "arch.target='experiment=tms_target max_stepz=3'"], "arch.target"),
    (["experiment=tms_5_2", "arch.target='experiment=tms_target lr=['"], "arch.target=exp"),
    (["arch=prefix", "data=passages", "arch.readers=[nowhere]"], "arch.readers[0]"),
    (["arch=cnn", "data=digits", "arch.dropout=[2.0,0.1]"], "arch.dropout"),
    (["objective_metric=eval/accurracy", "arch.hidden_size=16"], "objective_metric"),
    (["eval_save_outputs=[logit]", "arch.hidden_size=16"], "eval_save_outputs"),
    (["optim.dense=[]", "arch.hidden_size=16"], "optim.dense"),
]


# each takes a second or two of a process: all of them in `make test-all`
ROWS = [
    pytest.param(row, marks=[] if number % 16 == 0 else pytest.mark.slow)
    for number, row in enumerate(TABLE)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[0])[:80])
def test_bad_input_is_one_line_that_names_the_key(row: Row, tmp_path: Path) -> None:
    arguments, key, ranks = (*row, 1)[:3]
    assert_one_line(run_line(arguments, tmp_path, ranks), key)
    written = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert not written, "no file is written before everything is right"


def test_a_true_process_says_the_same(tmp_path: Path) -> None:
    """Forks have no CUDA: what a process says where there is none is asked for here."""
    there = torch.cuda.is_available()
    key, line = ("lr=fast", "lr=fast") if there else ("device=cuda", "device=cuda: PyTorch")
    done = launched([sys.executable, str(ROOT / "pretrain.py"), key], cwd=tmp_path)
    assert_one_line([Completed(0, done.returncode, done.stdout, done.stderr)], line)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_package_that_is_missing_is_one_line(ranks: int, tmp_path: Path) -> None:
    arguments = ["data=digits", "arch=cnn", "optim=adamw", "max_steps=2"]
    env = {"FAULT_WITHOUT": "sklearn"}
    done = faulty(tmp_path, "raise@objective", "all", 0, *arguments, ranks=ranks, env=env)
    assert_one_line(done, f"scikit-learn is needed: {sys.executable} -m pip install scikit-le")


@pytest.mark.slow
def test_torchrun_shows_one_line_of_ours() -> None:
    done = torchrun(2, "global_batch_size=100")
    assert done.returncode != 0
    assert done.stderr.count("error: global_batch_size=100") == 1
    assert "error on rank" not in done.stderr
