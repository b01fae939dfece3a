"""A dataset, a net, an optimizer and a sync are each one file and one yaml, with nothing to edit.

A copy of the repository gets one of each. They train together on two ranks, and the tests that look
at all files and all configurations pass there. So do the examples of the guides.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ranks
from tests.ranks import LAUNCHER_PREFIXES, ROOT, check_ended_well, run_ranks
from tests.runs import QUIET, TINY_GPT, Result, train

DATA = '''
"""Rows of bits; the label is their parity."""

import numpy as np

from data.source import RunLength, Source
from utils.spec import Spec


class ParitySource(Source):
    def __init__(self, run, bits=8):
        self._seed, self._size, self._bits = run.seed, run.global_batch_size // run.shards, bits
        self.spec = Spec(num_features=bits, num_classes=2, fingerprint=f"{run.seed} {bits}")
        self.length = RunLength.in_steps(run)

    def train_batch(self, step, shard):
        rng = np.random.default_rng([self._seed, step, shard])
        bits = rng.integers(0, 2, (self._size, self._bits))
        return {"inputs": bits.astype(np.float32), "labels": bits.sum(1) % 2}

    def eval_sets(self):
        return {"parity": Held(self._bits)}


class Held:
    def __init__(self, bits):
        self._rows = np.array([[row >> bit & 1 for bit in range(bits)] for row in range(1 << bits)])

    def __len__(self):
        return len(self._rows)

    def read(self, indices):
        rows = self._rows[indices]
        return {"inputs": rows.astype(np.float32), "labels": rows.sum(1) % 2}

    def padding(self, rows):
        width = self._rows.shape[1]
        return {"inputs": np.zeros((rows, width), np.float32), "labels": np.full(rows, -100)}
'''
MODEL = '''
"""A perceptron with one hidden layer, and its loss."""

import torch.nn.functional as F
from torch import nn

from models.layers import parse_dtype
from models.objective import Objective, StepOut
from utils.measure.evaluator import Prediction


class Perceptron(nn.Module):
    def __init__(self, spec, width=16, forward_dtype="float32"):
        super().__init__()
        self.dtype = parse_dtype(forward_dtype)
        self.hidden = nn.Linear(spec.num_features, width)
        self.out = nn.Linear(width, spec.num_classes)

    def forward(self, inputs):
        return self.out(self.hidden(inputs).tanh())


class Classify(Objective):
    def forward(self, batch, carry, ctx):
        loss, count, metrics = self.score(batch)
        return StepOut(loss, count, metrics)

    def predict(self, batch):
        return Prediction(self.score(batch)[2], {})

    def score(self, batch):
        labels, logits = batch["labels"], self.model(batch["inputs"])
        count, right = (labels >= 0).sum(), (logits.argmax(-1) == labels).sum()
        loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        return loss, count, {"accuracy": (right, count)}
'''
# A guide's examples follow the names of their files
BLOCK = re.compile(
    r"`([\w/]+\.(?:py|yaml))`[^\n]*\n(?:[^\n`]*\n)?\n```(?:python|yaml)\n(.*?)```", re.DOTALL
)


def examples(guide: str) -> dict[str, str]:
    return dict(BLOCK.findall((ROOT / guide).read_text()))


ADDED = {
    **examples("optim/README.md"),
    **examples("optim/sync/README.md"),
    "data/parity.py": DATA,
    "conf/data/parity.yaml": """
        # Rows of bits and their parity.
        _target_: data.parity.ParitySource
        bits: 8  # [>= 1, <= 16]
    """,
    "models/perceptron.py": MODEL,
    "conf/arch/perceptron.yaml": """
        # One hidden layer.
        _target_: models.perceptron.Perceptron
        loss: {_target_: models.perceptron.Classify}
        width: 16  # [>= 1]
        forward_dtype: float32
    """,
    "conf/experiment/parity.yaml": """
        # @package _global_
        # python pretrain.py experiment=parity
        defaults:
          - override /data: parity
          - override /arch: perceptron
          - override /optim: sign_descent
          - override /sync: one_by_one

        global_batch_size: 32
        epochs: null
        eval_interval: null
        max_steps: 2
    """,
}
# Guides, and the arguments that train their examples
SHORT = ["epochs=null", "eval_interval=null", "max_steps=2", "global_batch_size=16"]
SMALL_TEXT = [word for word in TINY_GPT if word.startswith("data.")]
BOARDS = ["data.embedded.train=16", "data.embedded.test=8", "arch.H_cycles=2"]
GUIDES = {
    "data/README.md": ["data=bars", "arch=cnn", "optim=adamw", *SHORT],
    "models/README.md": ["arch=mine", "data=digits", "optim=adamw", *SHORT],
    "docs/adding-an-objective.md": ["arch=focal", *TINY_GPT[1:], *SHORT],
    "models/recursive/README.md": ["experiment=demo", "arch=whole", *BOARDS, *SHORT],
    "models/language/README.md": ["arch=bigram", "data=tokens", *SMALL_TEXT, "optim=adamw", *SHORT],
}
LOOK_AT_ALL = [  # the tests that list files or choices
    *("tests/test_layout.py", "tests/test_bad_input.py", "tests/optim/test_groups.py"),
    *("tests/test_config.py::test_every_experiment_runs_two_steps[parity]",),
]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with one more of everything."""
    copy = tmp_path_factory.mktemp("extended") / "lockstep"
    hidden = shutil.ignore_patterns(".*", "runs", "wheels")
    shutil.copytree(ROOT, copy, ignore=hidden)
    for name, text in ADDED.items():
        assert not (copy / name).exists()
        lines = text.strip("\n").split("\n")
        indent = len(lines[0]) - len(lines[0].lstrip())
        (copy / name).write_text("\n".join(line[indent:] for line in lines).rstrip() + "\n")
    return copy


@pytest.mark.slow
def test_one_file_and_one_yaml_each_train_on_two_ranks(
    extended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "forks", None)  # which have imported the repository itself
    results = {}
    for number in (1, 2):
        arguments = [
            "experiment=parity",
            *QUIET,
            "check=true",
            f"checkpoint_path={tmp_path}/{number}",
        ]
        check_ended_well(
            run_ranks(number, [str(extended / "pretrain.py"), *arguments], cwd=tmp_path)
        )
        results[number] = Result(tmp_path / str(number))
    assert len(results[2].series("train/loss")) == 2
    assert results[2].series("eval/accuracy") == results[1].series("eval/accuracy")
    for name in ("train/loss", "train/accuracy"):
        assert results[2].series(name) == pytest.approx(results[1].series(name), abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_test_has_a_list_that_must_be_edited(extended: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-m", "", *LOOK_AT_ALL]
    done = subprocess.run(
        command, cwd=extended, env=env, capture_output=True, text=True, timeout=380, check=False
    )
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
@pytest.mark.parametrize("guide", GUIDES)
def test_the_examples_of_a_guide_train_on_two_ranks(
    guide: str, extended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in examples(guide).items():
        assert not (ROOT / name).exists()
        (extended / name).write_text(text)
    monkeypatch.setattr(ranks, "forks", None)
    losses = {}
    for number in (1, 2):
        arguments = [*GUIDES[guide], *QUIET, "check=true", f"checkpoint_path={tmp_path}/{number}"]
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
    run = train(tmp_path / "run", *mine, *rest, "global_batch_size=16", ranks=2)
    assert len(run.series("train/loss")) == 2
