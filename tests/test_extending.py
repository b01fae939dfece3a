"""A dataset, a net, an objective, an optimizer and a sync are each one file and one yaml, with
nothing to edit.

A copy of the repository gets the examples of the guides. Each trains on two ranks there, and the
tests that look at all files and all configurations pass.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import ranks
from tests.documented import commands
from tests.ranks import ROOT, check_ended_well, run_ranks
from tests.runs import QUIET, TINY_GPT, Result, launched, train

# A guide's examples follow the names of their files
BLOCK = re.compile(
    r"`([\w/]+\.(?:py|yaml))`[^\n]*\n(?:[^\n`]*\n)?\n```(?:python|yaml)\n(.*?)```", re.DOTALL
)


def examples(guide: str) -> dict[str, str]:
    return dict(BLOCK.findall((ROOT / guide).read_text()))


GUIDES = ["optim/README.md", "data/README.md", "models/README.md", "docs/adding-an-objective.md"]
# What trains their examples
SHORT = ["epochs=null", "eval_interval=null", "max_steps=2", "global_batch_size=16"]
ADAMW = ["optim=adamw", "trial=true", *SHORT]
TRAINED = {
    "sign_descent": [
        *("arch=cnn", "data=digits", "optim=sign_descent", "sync=one_by_one", "trial=true"),
        *SHORT,
    ],
    "mine": ["arch=mine", "data=table", "data_path=diabetes.csv", *ADAMW],
    "focal": ["arch=focal", "trial=true", *TINY_GPT[1:], *SHORT],
    "contrast": ["arch=contrast", "data=digits", "micro_batch_size=4", *ADAMW],
}
LOOK_AT_ALL = ["tests/test_layout.py", "tests/optim/test_groups.py"]  # files or choices


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with one more of everything."""
    copy = tmp_path_factory.mktemp("extended") / "lockstep"
    hidden = shutil.ignore_patterns(".*", "runs", "wheels")
    shutil.copytree(ROOT, copy, ignore=hidden)
    for guide in GUIDES:
        for name, text in examples(guide).items():
            assert not (ROOT / name).exists()
            (copy / name).write_text(text)
    return copy


@pytest.mark.slow
def test_the_commands_of_the_guide_make_data_train_and_answer(
    extended: Path, tmp_path: Path
) -> None:
    guide = [*commands(ROOT / "data/README.md"), *commands(ROOT / "models/README.md")]
    made, trained, answered = (
        next(each.words for each in guide if part in each.words[-1])
        for part in ("to_csv", "run_name=mine", "eval_save_outputs")
    )
    for words, more in ((made, ()), (trained, (*QUIET, "epochs=20")), (answered, QUIET)):
        start = [str(extended / word) if word == "pretrain.py" else word for word in words[1:]]
        done = launched([sys.executable, *start, *more], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert [*tmp_path.rglob("*_test_preds.*")]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_test_has_a_list_that_must_be_edited(extended: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-m", "", *LOOK_AT_ALL]
    done = launched(command, cwd=extended, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:]


def test_git_keeps_what_is_added_and_no_datasets(tmp_path: Path) -> None:
    kept = {"data/mine/x.py", "data/mine/README.md"}
    built = ["data/sudoku-x/identifiers.json", "data/sudoku-x/train/all__inputs.npy"]
    for name in (*kept, *built, "data/text/a.parquet", "runs/demo/demo/log.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / ".gitignore", tmp_path)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    added = subprocess.check_output(["git", "ls-files"], cwd=tmp_path, text=True)
    assert {*added.split()} == {".gitignore", *kept}


@pytest.mark.slow
@pytest.mark.parametrize("example", TRAINED)
def test_the_examples_of_the_guides_train_on_two_ranks(
    example: str, extended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "forks", None)  # which have imported the repository itself
    table = np.random.default_rng(0).normal(size=(300, 4))
    np.savetxt(tmp_path / "diabetes.csv", table, delimiter=",", header="a,b,c,d")
    losses = {}
    for number in (1, 2):
        arguments = [*QUIET, *TRAINED[example], f"checkpoint_path={tmp_path}/{number}"]
        arguments += ["arch.forward_dtype=float64", "num_workers=0"]
        check_ended_well(
            run_ranks(number, [str(extended / "pretrain.py"), *arguments], cwd=tmp_path)
        )
        losses[number] = Result(tmp_path / str(number)).series("train/loss")
    assert len(losses[1]) == 2
    assert losses[2] == pytest.approx(losses[1], abs=1e-6)


def test_a_yaml_outside_the_repository_is_a_choice(tmp_path: Path) -> None:
    for group, base in (("data", "features"), ("arch", "tms"), ("sync", "ddp")):
        (tmp_path / "conf" / group).mkdir(parents=True)
        shutil.copy(ROOT / "conf" / group / f"{base}.yaml", tmp_path / "conf" / group / "mine.yaml")
    mine = ["--config-dir", f"{tmp_path}/conf", "data=mine", "arch=mine", "sync=mine"]
    rest = ["optim=adamw", "epochs=null", "eval_interval=null", "max_steps=2", "data.held_out=64"]
    run = train(tmp_path / "run", *mine, *rest, "global_batch_size=16")
    assert len(run.series("train/loss")) == 2
