"""Checkpoints whose manifest is right and whose content is not: named in one line, passed over, and
never waited for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.utils.checkpoint.helpers import META, alone, declare
from utils.checkpoint import manifest, reader
from utils.checkpoint.__main__ import main
from utils.errors import ConfigError

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = "[" * 100_000
LIE = 10**30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The newest of two good checkpoints, to be spoilt."""
    alone(tmp_path / "run" / "checkpoints", 20)
    return alone(tmp_path / "run" / "checkpoints", 30)


def spoilt(folder: Path, file: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused in one line, and the one before it taken."""
    said: list[str] = []
    assert reader.newest_whole(folder.parent, said.append) == folder.parent / "step_20"
    (line,) = said
    assert line.startswith(f"checkpoint step_30 is damaged ({file}: ")
    assert problem in line
    assert "\n" not in line
    assert len(line) < 500
    assert main(["digest", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"checkpoint={folder}: ")
    assert problem in err
    assert main(["digest", str(folder.parent / "step_20")]) == 0
    capsys.readouterr()


def seal(folder: Path, **changes: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text()) | changes
    (folder / "meta.json").write_text(
        json.dumps({key: value for key, value in meta.items() if value is not ...})
    )
    declare(folder)


WRONG: list[tuple[str, Any, str]] = [
    *((key, ..., f"has no {key}") for key in (*META, "step")),
    ("groups", ..., "names no groups"),
    *(
        ("step", value, "step")
        for value in ("ten", -1, float("nan"), 1.0, True, LIE, None, [30], 31)
    ),
    ("step", 31, "step=31 in a folder of that name"),
    *(
        ("config", value, "config")
        for value in (
            None,
            7,
            {},
            "",
            "abc",
            "- a",
            "a: [",
            "\0",
            "a: " + DEEP,
            "a: *x",
            BOMB,
            "a: ${",
            "shards: x",
        )
    ),
    *(
        ("config", text, "config")
        for text in (
            "shards: 0",
            f"shards: {LIE}",
            "shards: true",
            "a: 1",
            "x: !!python/object:os.x {}",
            "a: " * 9**6,
        )
    ),
    *(
        ("groups", value, "groups")
        for value in ({}, "model", ["model", 1], [[]], ["../x"], ["model", "optimizer", ""])
    ),
    ("groups", [], "ema.safetensors: not among the groups"),
    ("groups", ["model"], "ema.safetensors: not among the groups"),
    ("groups", ["optimizer", "model", "ema", "gone"], "gone.safetensors"),
    ("groups", ["optimizer", "model"], "ema.safetensors: not among the groups"),
    *(("results", value, "results") for value in ([], "x", None, {"a": "b"}, {"a": None})),
    *(("wandb_id", value, "wandb_id") for value in ({}, 7, ["x"])),
    *(("best", value, "best") for value in ("x", float("nan"), True, [])),
    *(
        (key, {}, key)
        for key in (
            "best_of",
            "threads",
            "torch",
            "code",
            "resumed_from",
            "fingerprint",
            "evaluation_due",
            "lr",
        )
    ),
    ("threads", "1", "threads=1 must be a whole number"),
    *(
        ("frozen", value, "frozen")
        for value in ([], {"a": "b"}, {"a": {"path": "x"}}, {"a": {"path": "x", "sha256": 7}})
    ),
]


@pytest.mark.parametrize(
    ("key", "value", "problem"), WRONG, ids=[f"{key}-{str(value)[:12]}" for key, value, _ in WRONG]
)
def test_a_meta_that_no_run_can_go_on_with(
    key: str, value: Any, problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(folder, **{key: value})
    assert manifest.damage(folder) == "", "the bytes are as the manifest says"
    if "safetensors" not in problem:
        with pytest.raises(
            ConfigError,
            match=(
                rf"^checkpoint={folder}: .*meta.json cannot be read \(.*; use another step_\*"
                r" folder$"
            ),
        ):
            reader.load(folder, {"model"})
    spoilt(
        folder,
        (
            "gone.safetensors"
            if problem.startswith("gone")
            else "ema.safetensors"
            if problem.startswith("ema")
            else "meta.json"
        ),
        problem,
        capsys,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "7",
        DEEP,
        '{"a":' * 100_000,
        "\xff",
        '{"groups": ' + "9" * 5000 + "}",
        " " * (1 << 25),
    ],
)
def test_a_meta_that_is_none(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "meta.json").write_bytes(text.encode("latin-1"))
    declare(folder)
    spoilt(folder, "meta.json", "", capsys)


def piece(first: int, last: int, shards: range) -> Callable[[Path], None]:
    """A file named by some shards that holds the state of others."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / "shards.0-7.safetensors")
        chosen = {
            key: value for key, value in tensors.items() if int(key.partition("/")[0]) in shards
        }
        save_file(chosen, folder / f"shards.{first}-{last}.safetensors")

    return write


def changed(
    name: str, change: Callable[[dict[str, torch.Tensor]], object]
) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return write


SHARDS = "shards.0-7.safetensors"
PIECES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "overlap": (piece(0, 2, range(3)), SHARDS, "holds shard 0, as another file does"),
    "a lie": (piece(0, 7, range(3)), "shards", "of shard 3 is not as that of shard 0"),
    "another shard": (
        changed(SHARDS, lambda t: t.update({"8/x": torch.ones(1)})),
        SHARDS,
        "holds 8/x, which is of no shard",
    ),
    "no shard": (
        changed(SHARDS, lambda t: t.update({"x": torch.ones(1)})),
        SHARDS,
        "holds x, which is of no shard",
    ),
    "written otherwise": (
        changed(SHARDS, lambda t: t.update({"03/x": torch.ones(1)})),
        SHARDS,
        "holds 03/x",
    ),
    "one is missing": (
        changed(SHARDS, lambda t: t.pop("4/state/0")),
        "shards",
        "state/0 of shard 4 is not as",
    ),
    "one of another shape": (
        changed(SHARDS, lambda t: t.update({"4/state/0": torch.ones(1)})),
        "shards",
        "state/0 of shard 4 is not as",
    ),
    "too many shards": (
        lambda f: (f / SHARDS).rename(f / "shards.0-8.safetensors"),
        "shards.0-8.safetensors",
        "which has 8",
    ),
    "shards without end": (
        lambda f: (f / SHARDS).rename(f / f"shards.0-{LIE}.safetensors"),
        f"shards.0-{LIE}.safetensors",
        "which has 8",
    ),
    "backwards": (
        lambda f: (f / SHARDS).rename(f / "shards.7-0.safetensors"),
        "shards.7-0.safetensors",
        "which has 8",
    ),
    "another name": (
        lambda f: (f / SHARDS).rename(f / "shards.00-7.safetensors"),
        "shards.00-7.safetensors",
        "not among the groups",
    ),
    "no file": (lambda f: (f / SHARDS).unlink(), "shards", "no state of shard 0"),
    "no model": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors", "damaged"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors", "damaged"),
    "a stranger": (
        lambda f: save_file({"x": torch.ones(1)}, f / "more.safetensors"),
        "more.safetensors",
        "not among the groups",
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_files_that_lie(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, file, problem = PIECES[name]
    spoil(folder)
    declare(folder)
    spoilt(folder, file, problem, capsys)


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def device(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def empty_folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("put", [pipe, device, empty_folder])
@pytest.mark.parametrize("name", ["manifest.json", "meta.json", "model.safetensors", SHARDS])
def test_only_plain_files_are_opened(
    put: Callable[[Path], None], name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder / name)
    spoilt(folder, name, "", capsys)
    if name != "manifest.json":
        (folder / "manifest.json").unlink()
        read: Callable[[Path], object] = (
            reader.load if name != SHARDS else lambda path: reader.load_shards(path, range(8))
        )
        with pytest.raises(ConfigError, match=r"not a plain file|Is a directory"):
            read(folder)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("put", [pipe, device, empty_folder])
def test_a_pointer_that_is_no_file(
    put: Callable[[Path], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder.parent / "latest")
    put(folder.parent / "best")
    assert reader.newest_whole(folder.parent, pytest.fail) == folder
    for path in (folder.parent, folder.parent.parent):
        assert main(["digest", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    alone(folder.parent, 40, keep=2, best=True)
    assert (
        (folder.parent / "latest").read_text()
        == (folder.parent / "best").read_text()
        == "step_40\n"
    )
