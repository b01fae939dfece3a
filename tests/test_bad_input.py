"""Wrong input ends with one line that names key, value and fix, and with status 2, before anything
slow happens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import (
    LAUNCHER_PREFIXES,
    ROOT,
    Completed,
    assert_one_line,
    free_port,
    run_line,
    run_ranks,
)
from utils.errors import short

# arguments, what the line must say, and the number of ranks where not one
Row = tuple[list[str], str] | tuple[list[str], str, int]

ARCHES = ", ".join(sorted(path.stem for path in (ROOT / "conf" / "arch").glob("*.yaml")))

LONG = "x" * 300
# what must be known from the command line alone
QUICK: list[Row] = [
    (["lrr=1"], "lrr=1: unknown key; did you mean lr?"),
    (["arch.hiden_size=64"], "arch.hiden_size=64: unknown key; did you mean arch.hidden_size?"),
    (["+fooo=1"], "fooo=1: unknown key"),
    (
        ["arch=hmr"],
        f"arch=hmr: unknown; choose one of {ARCHES}",
    ),
    (["experiment=demos"], "experiment=demos: unknown; choose one of"),
    (["lr=fast"], "lr=fast: must be a number, for example 0.0001"),
    (["epochs=1.5"], "epochs=1.5: must be a whole number"),
    (["max_steps=ten"], "max_steps=ten: must be a whole number"),
    (["ema=7"], "ema=7: must be true or false"),
    (["compile=maybe"], "compile=maybe: must be auto, true, false or max"),
    (["wandb.mode=on"], "wandb.mode=on: must be auto, online, offline or disabled"),
    (["on_nonfinite=stop"], "on_nonfinite=stop: must be raise or skip"),
    (["global_batch_size=100"], "global_batch_size=100 is not a multiple of shards=8; try 104"),
    (["global_batch_size=0"], "global_batch_size=0: must be at least 1"),
    (["eval_interval=3"], "eval_interval=3 does not divide epochs=100000; try epochs="),
    (["expected={at: {5: [0, 1]}}"], "needs metric and at; write for example {metric: eval/"),
    (["expected={metric: x, at: {5: 3}}"], "expected.at={5: 3}: write for example {metric: eval/"),
    (["expected={metric: x, at: {5: [2, 1]}}"], "expected.at={5: [2, 1]}: write for example"),
    (["micro_batch_size=5"], "micro_batch_size=5 is less than one shard of 96 examples"),
    (["eval_only=true"], "eval_only=true needs weights"),
    (["plan=true"], "plan=true: must be auto, show or false"),
    (
        ["plan=auto", "micro_batch_size=96"],
        "micro_batch_size=96: is what plan=auto is to find; remove one of them",
    ),
    (
        ["plan=auto", "plan_cards=8x80"],
        "plan_cards=8x80: says for which GPUs plan=show plans; add it, or remove plan_cards",
    ),
    (
        ["plan=show", "plan_cards=0x80"],
        "plan_cards=0x80: write numbers of GPUs and their GiB, as 8x80, or 2x80+24",
    ),
    (
        ["exact=true", "sync=ddp"],
        "exact=true: sync=ddp adds gradients in an order of its own; use sync=allreduce",
    ),
    (
        ["exact=true", "sync=fsdp"],
        "exact=true: sync=fsdp adds gradients in an order of its own; use sync=allreduce",
    ),
    (
        ["sync=fsdp", "micro_batch_size=auto"],
        "micro_batch_size=auto: ranks may find different numbers, which sync=fsdp cannot",
    ),
    (
        ["sync=fsdp", "compile=max"],
        (
            "compile=max: sync=fsdp moves weights, which CUDA graphs expect in their places; use"
            " compile=true"
        ),
    ),
    (
        ["sync=fsdp", "arch=trm", "optim=muon"],
        "optim=muon: needs whole matrices, and sync=fsdp splits them; use sync=ddp",
    ),
    (
        ["sync=fsdp", "micro_batch_size=96"],
        "micro_batch_size=96 on 3 ranks: with sync=fsdp all have equally many micro-batches, and",
        3,
    ),
    (["sync=ddp", "sync.bucket_mb=0.5"], "sync.bucket_mb=0.5: must be at least 1"),
    (
        ["exact=true", "micro_batch_size=1"],
        (
            "micro_batch_size=1 is less than one shard of 96 examples; raise it to 96, or raise"
            " shards=8 to 768, which makes another run"
        ),
    ),
    (["keep=0"], "keep=0: must be at least 1"),
    (["checkpoint_minutes=0"], "checkpoint_minutes=0.0: must be more than 0"),
    (["~lr"], "lr: every key is needed"),
    (["~data_paths"], "~data_paths: every key is needed"),
    (["wandb=online"], "wandb=online: must be a group of keys"),
    (["lr=nan"], "lr=nan: must be a number"),
    (["data.shards=4"], "data.shards=4: unknown key; did you mean shards?"),
    (["data.data_paths=[x]"], "data.data_paths=['x']: follows data_paths; set data_paths"),
    (["data_paths=[1]"], "data_paths=[1]: must be a list of words"),
    (
        ["arch=cnn", "puzzle_emb_lr=1"],
        "puzzle_emb_lr=1: the arch chosen here has no such key; it belongs to arch=hrm, arch=trm",
    ),
    (["eval_every_steps=0"], "eval_every_steps=0: must be at least 1"),
    (["micro_batch_size=all"], "micro_batch_size=all: must be a whole number, auto or null"),
    (["beta1=1"], "beta1=1.0: must be less than 1"),
    (["arch=prefix", "data=qa", "arch.latents=0"], "arch.latents=0: must be at least 1"),
    (
        ["data=mnist", "data_paths=[x]"],
        "data_paths=[x]: the data chosen here has no such key; it belongs to data=puzzles",
    ),
    (["arch.puzzle_emb_ndim=abc"], "arch.puzzle_emb_ndim=abc: must be a whole number"),
    (["+experiment=demos"], "experiment=demos: unknown; choose one of"),
    (["lr=1,2"], "lr=1,2: several values; add -m"),
    (["lr=="], "lr==: cannot be read"),
    # names are names of directories
    (["run_name="], "run_name=: is empty"),
    (["run_name=."], "run_name=.: must be a name"),
    (["run_name=.."], "run_name=..: must be a name"),
    (["run_name=' '"], "must be a name"),
    (["run_name=a/../b"], "run_name=a/../b: must be a name, that of a folder of its own"),
    (["objective_metric=-"], "objective_metric=-: names no metric"),
    (["+hydra.sweeper.params={lr: '1,2'}"], "the command line cannot be used"),
    (["run_name=/a"], "run_name=/a: must be a name, that of a folder of its own"),
    (["project_name=../x"], "project_name=../x: must be a name, that of a folder of its own"),
    (["--e=x.pickle"], "--e=x.pickle: no option of ours"),
    (["--config-n", "x"], "--config-n: no option of ours"),
    (["data_path=/tmp/" + "x" * 5000], "error: data_path=xxx"),
    (["run_name=" + "x" * 201], "is 201 bytes long; a name of a folder takes at most 200"),
    (["run_name='" + "é" * 101 + "'"], "is 202 bytes long"),
    (["run_name='a\0b'"], "run_name=a\\x00b: holds a character that cannot be printed"),
    (
        ["run_name='a\x1b[2J\nb'"],
        "run_name=a\\x1b[2J\\nb: holds a character that cannot be printed",
    ),
    (["checkpoint_path=.."], "checkpoint_path=..: must end with a name"),
    # variables that are not set
    (["init_from="], "init_from=: is empty", 2),
    (["resume="], "resume=: is empty"),
    (["resume=null"], "resume=null: must be auto, a word, true or false"),
    (["checkpoint=", "eval_only=true"], "checkpoint=: is empty"),
    (["checkpoint_path="], "checkpoint_path=: is empty"),
    (["data_path="], "data_path=: is empty"),
    (["data_paths=['']"], "data_paths=['']: must be a list of words"),
    (["eval_save_outputs=[[a]]"], "eval_save_outputs=[['a']]: must be a list of words"),
    (["lr="], "lr=: must be a number"),
    ([""], "'': an empty argument"),
    # what stands for something else
    (["arch=trm", "arch.mlp_t=${oc.env:HOME}"], "arch.mlp_t=/"),
    (
        ["lr=${oc.env:NO_SUCH_VARIABLE}"],
        (
            "error: lr=${oc.env:NO_SUCH_VARIABLE}: the environment variable NO_SUCH_VARIABLE is"
            " not set"
        ),
    ),
    (
        ["lr=${oc.env:NO_SUCH_VARIABLE,'1e-3'}"],
        "lr=1e-3: must be a number, for example 0.0001; this is a word",
    ),
    (["epochs=${oc.decode:'1.5'}"], "epochs=1.5: must be a whole number"),
    (["seed=${oc.decode:'-3'}"], "seed=-3: must be at least 0"),
    (["lr=${foo}"], "error: lr=${foo}: there is no key foo"),
    (["lr=${beta1}", "beta1=${lr}"], "leads back to itself"),
    (["lr=${nope:1}"], "lr=${nope:1}: cannot be read as an interpolation"),
    (["lr=${beta1"], "lr=${beta1: cannot be read"),
    (["sync.shards=${seed}"], "sync.shards=0: follows shards"),
    (["lr=???"], "lr=???: stands for a value that is missing"),
    # nothing but what this repository makes
    (["arch._target_=os.system"], "arch._target_=os.system: only things of this repository"),
    (["arch._target_=models.trm.torch.load"], "arch._target_=models.trm.torch.load: not found"),
    (
        ["data._target_=data.build.sudoku.main"],
        "data._target_=data.build.sudoku.main: only things of this repository",
    ),
    (
        [
            "arch=cnn",
            "data=digits",
            "arch.dropout=[{_target_: torch.load, f: x.pt, weights_only: false},0.1]",
        ],
        "arch.dropout[0]._target_=torch.load: ",
    ),
    (
        [
            "optim.dense=[{match: '.*', optimizer: {_target_: optim.builtin.sgd, lr: {_target_:"
            " os.makedirs, name: made}}}]"
        ],
        "optim.dense[0].optimizer.lr._target_=os.makedirs: nothing is made here",
    ),
    (
        ["optim.dense=[{match: '.*', optimizer: {_target_: optim.builtin.sgd, _partial_: true}}]"],
        "optim.dense[0].optimizer._partial_=True: ",
    ),
    (["+_target_=os.system"], "_target_=os.system: nothing is made here"),
    (
        ["lr=${optim.sparse}"],
        "lr._target_=optim.sparse_signsgd.SparseSignSGD: nothing is made here",
    ),
    # numbers that no machine computes with
    (["seed=-1"], "seed=-1: must be at least 0"),
    (
        ["seed=1e30"],
        "seed=1000000000000000019884624838656: whole numbers must be less than 9223372036854775808",
    ),
    (["keep=9223372036854775808"], "keep=9223372036854775808: whole numbers must be less than"),
    (["seed=" + "9" * 5000], "a number of 5000 digits"),
    (["lr=0." + "9" * 5000], "a number of 5000 digits", 2),
    (["arch.dropout=[0.1," + "9" * 5000 + "]"], "a number of 5000 digits"),
    (["lr=1e400"], "lr=inf: must be a number, and a finite one"),
    (
        ["arch=cnn", "arch.dropout=[nan,0.1]"],
        "arch.dropout[0]=nan: must be a number, and a finite one",
    ),
    (["lr=1e300"], "lr=1e+300: must be at most 1000000"),
    (
        ["optim.dense=[{match: '.*', optimizer: {_target_: optim.builtin.sgd, lr: 1e300}}]"],
        "optim.dense[0].optimizer.lr=1e+300: must be at most",
    ),
    (["timeout_s=1e300"], "timeout_s=1e+300: must be at most 2592000", 2),
    (["timeout_s=nan"], "timeout_s=nan: must be a number"),
    (["checkpoint_minutes=1e300"], "checkpoint_minutes=1e+300: must be at most 43200"),
    (["num_workers=1000000"], "num_workers=1000000: must be at most 256"),
    (["shards=1000000000"], "shards=1000000000: must be at most 65536"),
    (["epochs=1e18"], "epochs=1000000000000000000: must be at most 1000000000"),
    (["sync.bucket_mb=1e300"], "sync.bucket_mb=1e+300: must be at most"),
    (["eval_batch_size=1e12"], "eval_batch_size=1000000000000: must be at most 1000000"),
    (["epochs=null"], "epochs=null: nothing says how long the run is; give epochs or max_steps"),
    # choices of groups
    (
        ["arch=null"],
        f"arch=null: unknown; choose one of {ARCHES}",
        2,
    ),
    (["data=null"], "data=null: unknown; choose one of digits, features, "),
    (["optim="], "optim=: unknown; choose one of"),
    (["+sync=null"], "sync=null: unknown; choose one of allreduce"),
    (
        ["arch=[trm,hrm]"],
        f"arch=[trm,hrm]: unknown; choose one of {ARCHES}",
    ),
    (["data=[digits]"], "data=[digits]: unknown; choose one of"),
    (["~optim"], "optim=null: unknown; choose one of"),
    (["arch=../arch/trm"], "arch=../arch/trm: unknown; choose one of"),
    # what Hydra itself finds
    (["="], "=: names no key"),
    (["+"], "+: names no key"),
    (["~"], "~: names no key"),
    (["@"], "@: names no key"),
    (["key="], "key: unknown key"),
    (["arch.mlp_t=true"], "arch.mlp_t=true: the arch chosen here has no such key"),
    (["~lr=3"], "~lr: every key is needed"),
    (["experiment=${lr}"], "experiment=${lr}: unknown; choose one of"),
    (["run_name=ünïcode"], "run_name=ünïcode: cannot be read; write key=value, with quotes around"),
    (["optim.dense={}"], "optim.dense={}: that key holds something of another kind"),
    (["optim.dense=adam"], "optim.dense=adam: must be a list"),
    (["--config-name=nope"], "Cannot find primary config 'nope'"),
    (["--config-dir=/nope"], "config directory '/nope' not found"),
    (["--nope"], "--nope: no option of ours; --help tells what there is"),
    (["--cfg", "x"], "argument --cfg/-c: invalid choice: 'x'"),
    (["--experimental-rerun=x.pickle"], "--experimental-rerun=x.pickle: no option of ours"),
    (
        ["hydra.run.dir=/proc/nope"],
        "hydra.run.dir=/proc/nope: cannot be used (No such file or directory)",
    ),
    (["hydra.sweep.dir=/proc/nope", "-m"], "hydra.sweep.dir=/proc/nope: cannot be used", 2),
    (
        ["hydra.callbacks.x._target_=os.system"],
        "hydra.callbacks.x._target_=os.system: Hydra would run that",
    ),
    (
        ["hydra.launcher._target_=os.system", "-m", "seed=0,1"],
        "hydra.launcher._target_=os.system: Hydra would run that",
    ),
    (
        ["hydra/sweeper=optuna", "-m", "seed=0,1", "hydra.sweeper.trials=0"],
        "error: hydra.sweeper.trials=0: must be at least 1",
    ),
    (["hydra/launcher=nope", "-m"], "hydra/launcher=nope: unknown; choose one of"),
    (["arch=null,trm", "-m"], "arch=null: unknown; choose one of"),
    (
        ["hydra.job.chdir=true"],
        "hydra.job.chdir=true: paths are relative to the folder where the command was started",
    ),
    (["device=tpu"], "device=tpu: choose auto, cpu or cuda"),
    (["arch.num_heads=7"], "arch.hidden_size=512 is not a multiple of arch.num_heads=7"),
    (["arch.num_heads=0"], "arch.num_heads=0: must be at least 1"),
    (["arch.hidden_size=1e9"], "arch.hidden_size=1000000000: must be at most 1048576"),
    (
        [f"init_from={LONG}"],
        f"init_from={short(LONG, 300)}: cannot be read (File name too long)",
    ),
    (
        [f"checkpoint_path={LONG}"],
        "cannot be made (File name too long); give a folder you may write to",
        2,
    ),
    (
        ["arch.loss.loss_type=hinge"],
        ("arch.loss.loss_type=hinge: must be stablemax_cross_entropy or softmax_cross_entropy"),
    ),
    (["arch.rope_theta=0"], "arch.rope_theta=0.0: must be more than 0"),
    # paths, which are looked at before anything slow is loaded
    (["data_path=nowhere"], "data_path=nowhere: no such file or folder", 2),
    (
        ["data_path=~/mine"],
        "data_path=~/mine: the shell has left the ~ as it is; write data_path=$HOME/mine",
    ),
    (["data_paths=[/,nowhere]"], "data_paths[1]=nowhere: no such file or folder"),
    ([f"resume={80 * 'x'}/nowhere"], f"resume={80 * 'x'}/nowhere: no such file or folder"),
    (["resume=nowhere"], "resume=nowhere: no such file or folder"),
    (["eval_only=true", "checkpoint=nowhere"], "checkpoint=nowhere: no such file or folder"),
    (
        [f"data_path={LONG}/x"],
        f"data_path={short(LONG + '/x', 300)}: cannot be read (File name too long)",
    ),
    (
        ["data_path=" + "x" * 5000],
        f"data_path={short(LONG)}: is 5000 bytes long; a name of a folder takes at most 200",
    ),
    (
        ["checkpoint_path=/etc/passwd/x"],
        "checkpoint_path=/etc/passwd/x: cannot be made (Not a directory)",
    ),
    (
        ["arch=gpt", "data=tokens", "arch.kv_heads=3"],
        "arch.num_heads=4 is not a multiple of arch.kv_heads=3",
    ),
]
# what only the run itself can find out
SLOW: list[Row] = [
    (
        ["arch.hidden_size=16", "eval_only=true", f"checkpoint={LONG}"],
        "cannot be read (File name too long); give a folder that you may read",
    ),
    (
        ["arch.hidden_size=16", "init_from=/"],
        "init_from=/: holds no meta.json, latest or checkpoints/latest",
    ),
    (
        ["arch.hidden_size=16", "resume=/"],
        "resume=/: holds no meta.json, latest or checkpoints/latest",
        2,
    ),
    (
        ["plan=show", "plan_cards=8GB", "arch.hidden_size=16"],
        "plan_cards=8GB: write numbers of GPUs and their GiB, as 8x80, or 2x80+24",
    ),
    (["data_path=/", "data_paths=[/]"], "data_path=/ and data_paths=['/'] are both given", 2),
    (["data_paths=[]"], "data_paths=[]: names no folder"),
    (
        ["evaluators=[arc]"],
        (
            "evaluators=[arc]: data.embedded/all holds no ARC puzzles (vocab_size=12, seq_len=900);"
            " use evaluators=[]"
        ),
    ),
    (
        ["evaluators=[ark]"],
        "evaluators=[ark]: unknown; choose from arc, vote, or use evaluators=[]",
    ),
    (
        ["evaluators=[{name:arc@ARC,submission_K:3}]"],
        "evaluators=[{'name': 'arc@ARC', 'submission_K': 3}]: unknown; choose from arc",
    ),
    (["data_path=/"], "data_path=/: no train/dataset.json there"),
    (["arch=cnn"], "arch=cnn needs images of 28×28"),
    (["arch=trm", "data=digits"], "arch=hrm and arch=trm solve puzzles, and the data has none"),
    (
        ["arch=hrm", "data=tokens", "data.embedded.mebibytes=1"],
        "arch=hrm and arch=trm solve puzzles, and the data has none",
    ),
    (["arch=gpt"], "arch=gpt needs text; use data=tokens or data=stream"),
    (
        ["data=qa"],
        (
            "arch.models=[]: names no net that answers; use arch=prefix, and give folders of runs"
            " of arch=gpt, or their arguments"
        ),
    ),
    (
        ["arch=prefix", "data=qa", "arch.models=[nowhere]"],
        "arch.models[0]=nowhere: no such file or folder; give the folder of a run",
    ),
    (
        ["arch=cnn", "data=digits", "arch.dropout=[2.0,0.1]"],
        "arch.dropout=[2.0, 0.1]: must be two rates",
    ),
    (
        ["objective_metric=eval/accurracy", "arch.hidden_size=16"],
        "objective_metric=eval/accurracy: not known here; choose from eval/accuracy",
    ),
    (
        ["eval_save_outputs=[logit]", "arch.hidden_size=16"],
        "eval_save_outputs=logit: not known here",
    ),
    (
        ["arch.halt_max_steps=1e12"],
        "arch.halt_max_steps=1000000000000: must be at most 10000",
    ),
    (["arch.L_layers=1e9"], "arch.L_layers=1000000000: must be at most 1000"),
    (["optim.dense=[]", "arch.hidden_size=16"], "optim.dense: no pattern matches parameter"),
    (
        ["optim.dense=[x]", "arch.hidden_size=16"],
        "optim.dense[0]=x: an entry has exactly the keys match and optimizer",
    ),
    (
        ["optim.dense=[{match: '.*'}]", "arch.hidden_size=16"],
        "optim.dense[0]={'match': '.*'}: an entry has exactly the keys match and optimizer",
    ),
    (
        [
            "optim.dense=[{match: 3, optimizer: {_target_: optim.builtin.sgd, lr: 1}}]",
            "arch.hidden_size=16",
        ],
        "optim.dense[0].match=3: must be",
    ),
    (
        ["optim.dense=[{match: null, optimizer: null}]", "arch.hidden_size=16"],
        "optim.dense[0].match=null: must be",
        2,
    ),
    (
        ["optim.dense=[{match: '.*', optimizer: null}]", "arch.hidden_size=16"],
        "optim.dense[0].optimizer=null: needs a _target_",
    ),
]


# each of the slow ones is a second or two of a process with torch: all of them in `make test-all`
ROWS = [
    *QUICK,
    *(
        pytest.param(row, marks=[] if number % 3 == 0 else pytest.mark.slow)
        for number, row in enumerate(SLOW)
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[0])[:80])
def test_bad_input_is_one_line(row: Row, tmp_path: Path) -> None:
    arguments, line, ranks = (*row, 1)[:3]
    assert_one_line(run_line(arguments, tmp_path, ranks), line)
    assert not any(tmp_path.iterdir()), "nothing is written before everything is right"


def pretrain(*arguments: str, cwd: Path = ROOT) -> list[Completed]:
    """A process as users start it."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith((*LAUNCHER_PREFIXES, "RANK", "WORLD_SIZE"))
    }
    command = [sys.executable, str(ROOT / "pretrain.py"), *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    return [Completed(0, done.returncode, done.stdout, done.stderr)]


def test_a_true_process_says_the_same(tmp_path: Path) -> None:
    assert_one_line(
        pretrain("lr=fast", cwd=tmp_path), "lr=fast: must be a number, for example 0.0001"
    )
    assert not any(tmp_path.iterdir())


def test_a_wrong_job_of_a_sweep_ends_all_ranks(tmp_path: Path) -> None:
    assert_one_line(run_line(["seed=x,0", "-m"], tmp_path, 2), "seed=x: must be a whole number")


def test_a_sweep_over_nothing_is_one_line(tmp_path: Path) -> None:
    assert_one_line(run_line(["-m", "seed=range(0)"], tmp_path), "seed=range(0): gives no value")


def test_a_line_that_hangs_is_killed(tmp_path: Path) -> None:
    """One rank of two waits for the other."""
    (alone,) = run_line(
        ["seed=1"],
        tmp_path,
        env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"},
        limit_s=2,
    )
    assert alone.returncode == -9


def test_cuda_that_is_absent_is_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert_one_line(run_line(["device=cuda"], tmp_path), "device=cuda: PyTorch")


def test_a_damaged_dataset_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    meta = {
        "pad_id": 0,
        "ignore_label_id": 0,
        "blank_identifier_id": 0,
        "vocab_size": 8,
        "seq_len": 4,
        "num_puzzle_identifiers": 1,
    }
    (folder / "dataset.json").write_text(
        json.dumps(meta | {"total_groups": 1, "mean_puzzle_examples": 1, "sets": ["all"]})
    )
    np.save(folder / "all__inputs.npy", np.zeros((1, 4), np.uint8))
    done = run_line([f"data_path={tmp_path}/set"], tmp_path)
    assert_one_line(done, f"data_path={tmp_path}/set")
    assert "all__" in done[0].stderr


def test_all_ranks_end_and_rank_0_speaks_first() -> None:
    done = run_ranks(9, ["pretrain.py", "seed=1", "timeout_s=60"], timeout=50)
    assert {rank.returncode for rank in done} == {2}
    assert sum(rank.stderr.count("error") for rank in done) == 1, "one rank says it, once"
    assert "shards=8 is less than the 9 ranks" in done[0].stderr


def test_torchrun_shows_one_line_of_ours(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        "pretrain.py",
    ]
    done = subprocess.run(
        [*command, "global_batch_size=100"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("error: global_batch_size=100") == 1
    assert "error on rank" not in done.stderr
