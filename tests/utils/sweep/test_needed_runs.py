"""Runs that a run needs: when they are made, when they exist already, and what they inherit."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from tests.runs import config_of
from utils.command import keys
from utils.command.root import Config
from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.sweep import needed_runs


def first(
    config: Config, made: list[Config], meta: Mapping[str, Any] = MappingProxyType({})
) -> Config:
    """Makes the needed runs with a stand-in for training."""

    def run(cfg: Config) -> None:
        made.append(cfg)
        folder = Path(cfg.checkpoint_path)
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / "latest").write_text("step_1\n")
        (folder / "status.json").write_text(json.dumps({"state": "finished"}))
        (folder / "config.yaml").write_text(
            OmegaConf.to_yaml(cfg.plain()).replace("forward_dtype: auto", "forward_dtype: float32")
        )

    with initialize_config_dir(str(keys.CONF), **keys.HYDRA_ARGUMENTS):
        return needed_runs.with_needed_runs(config, meta, Dist(), run)[0]


def test_it_is_made_once_for_what_it_is(tmp_path: Path) -> None:
    def asking(more: str) -> Config:
        target = (
            f"experiment=tms_target arch.forward_dtype=auto checkpoint_path={tmp_path}/target"
            f" {more}"
        )
        return config_of("experiment=tms_5_2", f"arch.target='{target}'")

    made: list[Config] = []
    assert first(asking(""), made).arch["target"] == f"{tmp_path}/target"
    assert first(asking("log_interval=7"), made).arch["target"] == f"{tmp_path}/target"
    assert len(made) == 1, "how it is reported makes no other run of it"
    for number, more in enumerate(["lr=0.1", "lr=0.1 max_steps=20"], start=2):
        first(asking(more), made)
        assert len(made) == number, f"with {more} it is another, and the run itself must say so"
    (tmp_path / "target" / "status.json").write_text(json.dumps({"state": "stopped"}))
    first(asking("lr=0.1 max_steps=20"), made)
    assert len(made) == 4


def test_it_has_from_the_run_that_needs_it_what_is_about_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[Config] = []
    mine = ["seed=5", "timeout_s=77", "wandb.mode=offline", "run_name=mine"]
    config = first(config_of("experiment=tms_5_2", *mine), made)
    (target,) = made
    assert (target.seed, target.timeout_s, target.wandb.mode) == (5, 77, "offline")
    assert target.run_name.startswith("tms-"), "it has its own name"
    assert config.arch["target"] == str(tmp_path / target.checkpoint_path)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_resume_and_an_evaluation_make_none(evaluates: bool, tmp_path: Path) -> None:
    """Which run it is, a checkpoint says, which may be a stranger's."""
    arguments, folder = f"experiment=tms_target checkpoint_path={tmp_path}/x", tmp_path / "target"
    folder.mkdir()
    config = config_of(
        *("experiment=tms_5_2", f"arch.target='{arguments}'"),
        *(["eval_only=true", "checkpoint=x"] if evaluates else []),
    )
    meta = {
        "config": {"arch": {"target": str(folder)}},
        "needed_runs": {"arch.target": arguments},
    }
    made: list[Config] = []
    assert first(config, made, meta).arch["target"] == str(folder)
    folder.rmdir()
    again = f"pretrain.py {arguments} exact=false checkpoint_path={folder} trains it again"
    with pytest.raises(ConfigError, match=f"^arch.target={folder}: .* gone; .*{again}$"):
        first(config, made, meta)
    if evaluates:
        forged = {"config": {"arch": {"target": arguments}}}
        with pytest.raises(ConfigError, match=r"^arch.target=.* an evaluation trains no other run"):
            first(config, made, forged)
    assert not made


def test_its_arguments_are_keys_of_a_run(tmp_path: Path) -> None:
    target = f"experiment=tms_target hydra.searchpath=[file://{tmp_path}]"
    with pytest.raises(ConfigError, match=r"^arch.target=.*: hydra.searchpath is not a key"):
        first(config_of("experiment=tms_5_2", f"arch.target='{target}'"), [])
