"""A single run's configuration is composed once, and is the one that `hydra.main` composes."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import pretrain
from tests.ranks import run_code, run_ranks
from utils.command import cli, keys
from utils.command.composing import compose_single_run


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = HydraConfig.instance().cfg
    yield
    HydraConfig.instance().cfg = before
    GlobalHydra.instance().clear()


def test_it_is_what_hydra_composes() -> None:
    arguments = ["experiment=demo", "lr=2e-3", "arch.loss.loss_type=softmax_cross_entropy"]
    raw = compose_single_run(arguments)
    assert raw is not None
    assert HydraConfig.get().runtime.choices.experiment == "demo"
    text = OmegaConf.to_yaml(OmegaConf.masked_copy(raw, [key for key in raw if key != "hydra"]))
    (printed,) = run_ranks(1, ["pretrain.py", "--cfg", "job", *arguments])
    assert text.strip() == printed.stdout.strip()
    raw.project_name = "${hydra:job.name}"  # a file may say so
    assert cli.resolve_job(raw).project_name == "pretrain"


def test_a_mistake_is_told_after_one_composition() -> None:
    code = (
        "import runpy, sys\n"
        "from hydra._internal.hydra import Hydra\n"
        "compose = Hydra.compose_config\n"
        "def counted(*args, **kwargs):\n"
        "    print('composes', flush=True)\n"
        "    return compose(*args, **kwargs)\n"
        "Hydra.compose_config = counted\n"
        "sys.argv = ['pretrain.py', 'lrr=1']\n"
        "runpy.run_path('pretrain.py', run_name='__main__')"
    )
    done = run_code(code)
    assert (done.returncode, done.stdout) == (2, "composes\n"), done.stderr


def test_the_program_runs_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing composes it a second time."""
    seen: list[object] = []
    monkeypatch.setattr(pretrain, "pretrain", seen.append)
    monkeypatch.setattr(pretrain, "app", lambda: seen.append("hydra"))
    monkeypatch.setattr(cli, "main", lambda program: program())
    checked = OmegaConf.create({"seed": 0})
    pretrain.main(checked)
    pretrain.main()
    gc.unfreeze()
    assert seen == [checked, "hydra"]


def test_the_program_may_compose_again_what_was_checked() -> None:
    """As a caller does who drops what `cli.check` returned."""
    code = (
        "import sys; from utils.checkpoint import reader; from utils.command import cli\n"
        "from utils.sweep import entry\n"
        "sys.argv = ['pretrain.py', 'experiment=digits', 'seed=3']\n"
        "cli.check(sys.argv, reader.config_in, entry.sweep); import pretrain\n"
        "pretrain.pretrain = lambda cfg: print('seed', cfg.seed, flush=True)\n"
        "pretrain.main()"
    )
    done = run_code(code)
    assert (done.returncode, done.stdout) == (0, "seed 3\n"), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--cfg", "job"], ["hydra.run.dir=x"], ["hydra/launcher=basic"], ["++hydra.verbose=true"]],
)
def test_what_asks_hydra_for_more_is_left_to_it(arguments: list[str]) -> None:
    assert compose_single_run(arguments) is None
    assert not GlobalHydra.instance().is_initialized()


def test_where_a_sweep_would_write_is_nothing_to_a_single_run() -> None:
    assert compose_single_run(["hydra.sweep.dir=/tmp/x"]) is not None


@pytest.mark.parametrize(
    "asked", ["mode: MULTIRUN", "job: {env_set: {A: b}}", "run: {dir: x}", "output_subdir: .hydra"]
)
def test_a_file_may_ask_hydra_for_more(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(keys.CONF, tmp_path / "conf")
    recipe = f"# @package _global_\nhydra:\n  {asked}\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(recipe)
    monkeypatch.setattr(keys, "CONF", tmp_path / "conf")
    assert compose_single_run(["seed=1"]) is not None
    GlobalHydra.instance().clear()
    assert compose_single_run(["experiment=mine"]) is None
    assert not GlobalHydra.instance().is_initialized()
