"""W&B never prompts and never holds up the end of a run; tests/test_disk_and_wandb_failures.py has
its death in a run.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import until
from utils import revision
from utils.files import read_text
from utils.measure.scene import scene
from utils.ranks.distributed import Dist
from utils.rundir.directory import RunDirectory
from utils.rundir.wandb_log import Table, WandB, resolve_mode, tables_of


def begun(folder: Path, **settings: object) -> RunDirectory:
    run = RunDirectory(folder, Dist()).__enter__()
    run.begin("lr: 0.001\n", {"mode": "offline", "project": "p", "name": "n", **settings})
    return run


@pytest.mark.parametrize(
    ("mode", "env", "expected"),
    [
        ("auto", {}, "auto"),
        ("auto", {"WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "nonsense"}, "auto"),
        ("online", {"WANDB_MODE": "offline"}, "online"),
    ],
)
def test_modes(mode: str, env: dict[str, str], expected: str) -> None:
    assert resolve_mode(mode, env) == expected


def test_the_code_and_the_size_of_a_run_stand_in_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Mapping[str, Any]] = []

    def begin(logger: WandB, mode: str, arguments: Mapping[str, Any], say: Any) -> Any:
        began.append(arguments)
        return SimpleNamespace(dir=str(tmp_path), save=lambda *given, **named: None)

    monkeypatch.setattr(WandB, "_begin", begin)
    run = RunDirectory(tmp_path / "x", Dist()).__enter__()
    run.begin("lr: 0.001\n", {"mode": "offline"}, facts={"parameters": 7})
    about = {"lr": 0.001, "num_params": 7, "ranks": 1, "revision": revision.revision()}
    assert began[0]["config"] == about


MATRIX = {
    "row_label": "truth",
    "panels": [{"name": "a", "rows": ["x"], "columns": ["y", "z"], "values": [[1, 2]]}],
}
X = {"x": {"label": "step", "values": [1, "never"]}}
LINE = [{"name": "loss", "values": [0.5, None]}]


@pytest.mark.parametrize(
    ("shown", "tables"),
    [
        ({"kind": "table", "columns": ["a"], "rows": [[1]]}, [("", ["a"], [[1]])]),
        (
            {"kind": "text", "items": [{"prompt": "a", "continuation": "b"}]},
            [("", ["prompt", "continuation"], [["a", "b"]])],
        ),
        (
            {"kind": "lines", "lines": LINE, **X},
            [("", ["step", "loss"], [[1, 0.5], ["never", None]])],
        ),
        (
            {"kind": "bars", "series": LINE, **X},
            [("", ["step", "loss"], [[1, 0.5], ["never", None]])],
        ),
        ({"kind": "matrix", **MATRIX}, [("a", ["truth", "y", "z"], [["x", 1, 2]])]),
        ({"kind": "images", "items": [{"pixels": "A"}]}, []),
    ],
)
def test_scenes_that_are_tables(shown: dict[str, Any], tables: list[Table]) -> None:
    assert tables_of(shown) == tables


@pytest.mark.slow
def test_the_real_package_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without credentials: quiet, and all within the run directory, to be continued there."""
    pytest.importorskip("wandb")
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = begun(tmp_path / "x", mode="auto")
    shown = scene(
        "words", "table", "Words", columns=["word", "count"], rows=[["sea", 2], ["", "?"]]
    )
    wrong = scene("wrong", "table", "Wrong", columns=["word"], rows=[["sea", 2]])
    run.write_evaluation(1, "val", {**shown, **wrong, "votes.npz": b""})
    run.log(1, {"loss": 1.0})
    run.close()
    (sent,) = (tmp_path / "x" / "wandb").glob("offline-run-*/files")
    assert read_text(sent / "git.txt").startswith("revision: ")
    (table,) = sent.glob("media/table/val/words_*.table.json")
    assert json.loads(read_text(table))["data"] == [["sea", 2], ["", "?"]]
    again = begun(tmp_path / "x", mode="auto", id=run.wandb_id)
    again.close()
    for folder in ("x", "x.old-1"):
        (file,) = (tmp_path / folder / "wandb").glob(f"offline-run-*-{run.wandb_id}/run-*.wandb")
        assert until(lambda file=file: file.stat().st_size > 100), "W&B's process writes it"
        # the second field of a message, 40 bytes: GitRepo.commit in W&B's protocol
        assert b"\x12\x28" + revision.revision().encode() in file.read_bytes()
    assert not list(tmp_path.rglob("requirements.txt"))
    assert not [file for file in (tmp_path / "home").rglob("*") if file.is_file()]
    said = capfd.readouterr()
    assert said.out.startswith("W&B: could not take wrong.scene.json (")
    assert said.out.endswith("\nthe former run of this name is now x.old-1\n")
    assert not said.err
