"""From overrides to a resolved configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data.build import maze
from tests.data.helpers import built
from tests.data.recursive.arc_helpers import write_folder
from tests.ranks import ROOT
from tests.runs import QUIET, config_of, torchrun, train
from utils.command import instantiate, keys
from utils.errors import ConfigError

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))

# Launch lines as the HRM and TRM READMEs print them, after the launcher; $D stands for the dataset.
LINES = {
    "hrm_sudoku": "data_path=$D epochs=20000 eval_interval=2000 lr=1e-4 puzzle_emb_lr=1e-4"
    " weight_decay=1.0 puzzle_emb_weight_decay=1.0",
    "hrm_full": "data_path=$D epochs=100 eval_interval=10 lr_min_ratio=0.1 global_batch_size=2304"
    " lr=3e-4 puzzle_emb_lr=3e-4 weight_decay=0.1 puzzle_emb_weight_decay=0.1"
    " arch.loss.loss_type=softmax_cross_entropy arch.L_cycles=8 arch.halt_max_steps=8"
    " arch.pos_encodings=learned",
    "trm_sudoku": "arch=trm data_paths=[$D] evaluators=[] epochs=50000 eval_interval=5000 lr=1e-4"
    " puzzle_emb_lr=1e-4 weight_decay=1.0 puzzle_emb_weight_decay=1.0 arch.mlp_t=True"
    " arch.pos_encodings=none arch.L_layers=2 arch.H_cycles=3 arch.L_cycles=6 +run_name=x ema=True",
    "trm_arc": "arch=trm data_paths=[$D] evaluators=[{name:arc@ARC}] arch.L_layers=2"
    " arch.H_cycles=3 arch.L_cycles=4 +run_name=x ema=True",
}


def targets(node: Any) -> Iterator[dict[str, Any]]:
    """Yields the mappings of a YAML file that have a `_target_`."""
    if isinstance(node, dict) and "_target_" in node:
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from targets(each)


def test_a_default_stands_in_yaml_or_in_a_signature_never_in_both() -> None:
    for path in (ROOT / "conf").rglob("*.yaml"):
        for given in targets(yaml.safe_load(path.read_text())):
            if "hydra" in given["_target_"]:
                continue
            module, _, name = given["_target_"].rpartition(".")
            target = getattr(import_module(module), name)
            parameters = inspect.signature(getattr(target, "takes", target)).parameters
            twice = [
                key
                for key, parameter in parameters.items()
                if key in given and parameter.default is not parameter.empty
            ]
            assert not twice, f"{path.name}: {given['_target_']}"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optim.dense=3", "optim.dense=3: must be a valid list"),
        (
            "optim.dense=[{match: 3, optimizer: {}}]",
            "optim.dense[0].match=3: must be a valid string",
        ),
        ("optim.dense=[{match: x}]", "optim.dense[0].optimizer=null: is missing"),
        ("+optim.spars=null", "optim.spars=null: unknown key; did you mean optim.sparse"),
        ("arch.loss=3", "arch.loss=3: needs a _target_"),
        ("arch=[hrm,trm]", "arch=[hrm,trm]: is not a name; --help arch lists the choices"),
    ],
)
def test_a_malformed_group_is_refused_before_anything_is_made(override: str, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        config_of(override)


class Own:
    """A net with names of keys that a run passes elsewhere."""

    def __init__(self, spec: Any, capacity: int, model: str, run: int, dist: int) -> None: ...


class Heavier(torch.optim.SGD):
    """An optimizer whose parent takes the remaining keys."""

    def __init__(self, params: Any, weight: float, **keywords: Any) -> None:
        super().__init__(params, **keywords)


def test_a_net_of_ones_own_may_have_any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "find", lambda part, path: Own)
    assert [*keys.keys_of({}, "arch").model_fields] == ["capacity", "model", "run", "dist"]


def test_a_net_that_forgets_what_it_is_given_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "find", lambda part, path: lambda width: None)
    mine = {"_target_": "models.mine.Net", "width": 4}
    with pytest.raises(ConfigError, match=r"^arch.width: models.mine.Net must take spec before"):
        keys.keys_of(mine, "arch")


def test_keys_of_a_parent_are_its_childs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (keys, instantiate):
        monkeypatch.setattr(module, "find", lambda part, path: Heavier)
    path, named = "optim.dense[0].optimizer", [torch.nn.Parameter(torch.zeros(1))]
    made = instantiate.make({"_target_": "", "lr": 1, "momentum": 0.5, "weight": 2.0}, path, named)
    assert [made.defaults[key] for key in ("lr", "momentum")] == [1.0, 0.5]
    with pytest.raises(ConfigError, match=r"optimizer.momentun=3: unknown key"):
        instantiate.make({"_target_": "", "weight": 2.0, "momentun": 3}, path, named)


def test_defaults_are_hrms_recipe() -> None:
    cfg = config_of()
    recipe = {
        "global_batch_size": 768,
        "lr": 1e-4,
        "lr_warmup_steps": 2000,
        "lr_min_ratio": 1.0,
        "beta1": 0.9,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "puzzle_emb_lr": 1e-2,
        "puzzle_emb_weight_decay": 0.1,
    }
    assert {key: getattr(cfg, key) for key in recipe} == recipe
    assert [cfg.arch[key] for key in ("hidden_size", "H_layers", "halt_max_steps")] == [512, 4, 16]


def test_the_name_follows_from_what_makes_the_run() -> None:
    name = config_of().run_name
    assert name.startswith("hrm-")
    same = ["num_workers=0", "wandb.mode=offline", "device=cpu", "keep=3", "on_nonfinite=skip"]
    assert config_of(*same).run_name == name, "how a run is computed or reported is not the run"
    for other in ("seed=1", "arch.L_cycles=3", "exact=true"):
        assert config_of(other).run_name != name
    assert config_of("+run_name=mine").checkpoint_path == "runs/puzzles/mine"
    assert config_of("data_path=data/sudoku-x").project_name == "sudoku-x"


def job(*overrides: str) -> str:
    """The name of a job of a sweep over these."""
    return config_of(*overrides, job=list(overrides)).run_name


def test_jobs_of_a_sweep_have_readable_names_of_their_own() -> None:
    assert job("experiment=demo", "seed=2") == "demo-seed=2"
    assert job("experiment=demo") == "demo", "the run that it is without a sweep"
    assert job("seed=2", "run_name=a", "arch=trm") == "a-arch=trm,seed=2"
    assert job("run_name=a", "experiment=demo") != job("run_name=a", "experiment=digits")
    assert (
        config_of("run_name=a", "seed=1", job=["seed=1"]).checkpoint_path == "runs/puzzles/a-seed=1"
    )
    assert config_of("seed=2", job=["seed=2"]).run_name == config_of("seed=2").run_name, (
        "a derived name tells jobs apart already"
    )


def test_the_same_job_has_the_same_name_in_every_sweep() -> None:
    assert (
        job("run_name=a", "lr=1e-3", "seed=0")
        == job("+seed=0", "lr=0.001", "run_name=a")
        == "a-lr=0.001,seed=0"
    )
    assert job("run_name=a", "seed=0", "num_workers=0", "wandb.mode=disabled") == "a-seed=0", (
        "how a run is reported is not the run"
    )


def test_names_of_jobs_fit_file_systems_and_stay_different() -> None:
    overrides = [
        f"run_name='{'é' * 90}'",
        *(
            f"{key}=1e-3"
            for key in ("lr", "puzzle_emb_lr", "weight_decay", "puzzle_emb_weight_decay")
        ),
    ]
    names = [job(*overrides, f"seed={seed}") for seed in (0, 1)]
    assert names[0] != names[1]
    assert names[0].startswith(f"{'é' * 90}-lr=0.001"), "in the order of the alphabet"
    with_swept = config_of(*overrides, "seed=1", job=[*overrides, "seed=1"], sweep="seed-ab12cd34")
    assert with_swept.run_name.startswith(f"{'é' * 90}-seed=1,lr=0.001"), "swept keys first"
    paths = [job("run_name=a", f"data_path={path}") for path in ("x/y", "x_y", "x:y")]
    paths += [job("run_name=a", "data_path='x,seed=1'"), job("run_name=a", "data_path=x", "seed=1")]
    assert len({*paths}) == len(paths)
    for name in (*names, *paths):
        assert len(name.encode()) <= 220
        assert not set("/: ") & set(name)


def test_a_length_in_steps_needs_no_epochs() -> None:
    cfg = config_of("epochs=null", "max_steps=12")
    assert cfg.epochs is None
    with pytest.raises(ConfigError, match=r"^epochs=null: .*give epochs or max_steps"):
        config_of("epochs=null")


def test_numbers_may_be_written_either_way() -> None:
    cfg = config_of("epochs=1e4", "lr=1", "run_name=7", "eval_interval=null")
    assert (cfg.epochs, cfg.lr, cfg.run_name, cfg.eval_interval) == (10000, 1.0, "7", None)
    assert isinstance(cfg.epochs, int)
    assert isinstance(cfg.lr, float)


SMALL = {  # for every recipe that has the key
    "arch.hidden_size": 64,
    "arch.num_heads": 2,
    "arch.num_layers": 1,
    "arch.mlp_width": 64,
    "compile": "false",
    "data.embedded.mebibytes": 1,
    "data.embedded.test": 8,
    "data.embedded.train": 64,
    "data.eval_split": "test",
    "data.max_new_tokens": 4,
    "data.val_passages": 16,
    "data.val_tokens": 500,
    "max_steps": 2,
    "micro_batch_size": "null",
    "tokens_per_update": "null",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "demo" else pytest.mark.slow) for name in EXPERIMENTS],
)
def test_every_experiment_runs_two_steps(name: str, tmp_path: Path) -> None:
    recipe = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    cfg = config_of(f"experiment={name}")
    known = dict(keys.leaves(cfg.plain()))
    shrunk = [f"{key}={value}" for key, value in SMALL.items() if key in known]
    shrunk.append(f"global_batch_size={cfg.shards}")
    if target := cfg.arch.get("target"):
        smaller = "max_steps=2 data.embedded.mebibytes=1" if "lm" in name else "max_steps=2"
        shrunk.append(f"arch.target='{target} {smaller} checkpoint_path={tmp_path}/target'")
    if readers := cfg.arch.get("readers"):
        smaller = "max_steps=2 data.embedded.mebibytes=1 data.val_tokens=500"
        smaller = "max_steps=2" if "facts" in name else smaller
        short = [
            f"'{reader} {smaller} checkpoint_path={tmp_path}/{number}'"
            for number, reader in enumerate(readers)
        ]
        shrunk.append(f"arch.readers=[{','.join(short)}]")
    if "/arch: gpt" in recipe:
        shrunk.append("data.seq_len=64")
    if "maze" in name:  # and not the boards that stand in for built puzzles
        made = ["--size", "6", "--min-path", "8", "--train", "16", "--test", "8"]
        assert maze.main([*made, "--output-dir", str(tmp_path / "data")]) == 0
        shrunk.append(f"data_path={tmp_path / 'data'}")
    result = train(tmp_path / "run", f"experiment={name}", *shrunk, "trial=true", timeout=400)
    assert len(result.series("train/loss")) == 2
    first = recipe.splitlines()
    assert first[0] == "# @package _global_"
    assert first[1].startswith("# "), "a recipe opens with its command"
    assert f"experiment={name}" in first[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_published_launch_lines_run_on_two_ranks(
    name: str, sudoku_9x9: Path, tmp_path: Path
) -> None:
    """Only size and length are shrunk: width, batch and epochs."""
    data = sudoku_9x9
    if name == "trm_arc":
        write_folder(raw := tmp_path / "raw", "abcdefgh", seed=1, most=5)
        data = built(tmp_path / "arc", "arc", "--train", raw, "--test", raw, "--num-aug", 3)
    overrides = LINES[name].replace("$D", str(data)).split()
    shrunk = [
        "arch.hidden_size=32",
        "arch.num_heads=2",
        "arch.H_cycles=1",
        "arch.L_cycles=1",
        "arch.halt_max_steps=2",
        "global_batch_size=16",
    ]
    done = torchrun(2, *overrides, *shrunk, "epochs=2", "eval_interval=1", *QUIET, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/*/*/checkpoints/step_*/model.*safetensors"))
