"""Checkpoints are known to be whole or refused, never unpickled, and have one digest."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks import run_code
from tests.runs import launched
from tests.utils.checkpoint.helpers import (
    META,
    alone,
    declare,
    flip,
    groups,
    names,
    shard_state,
    together,
)
from utils.checkpoint import reader
from utils.errors import ConfigError

FILES = sorted(
    ["manifest.json", "meta.json"]
    + [f"{group}.safetensors" for group in ("ema", "model", "optimizer", "shards")]
)


def refused(path: Path, call: Callable[..., object] = reader.load) -> str:
    with pytest.raises(ConfigError) as caught:
        call(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"checkpoint={path}: ")
    return text


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    alone(checkpoints, 9)
    folder = alone(checkpoints, 40)
    assert names(folder) == {*FILES}
    (checkpoints / "best").write_text("step_9\n")
    for path in (folder, checkpoints, tmp_path, checkpoints / "latest", str(tmp_path)):
        loaded, meta = reader.load(path)
        assert meta == {**META, "value": 40.0, "step": 40, "ranks": 1}
        assert loaded.keys() == {"model", "ema", "optimizer", "shards"}
        for key, expected in groups(40.0)["model"].items():
            assert torch.equal(loaded["model"][key], expected)
            assert loaded["model"][key].dtype == expected.dtype
        expected = shard_state(5, 40.0)["state/0"]
        assert torch.equal(loaded["shards"]["5/state/0"], expected)
    assert reader.load(tmp_path, only=["model"])[0].keys() == {"model"}
    assert reader.load(checkpoints / "best")[1]["step"] == 9
    loaded, meta = reader.load(folder / "model.safetensors", ["weights", "more"])
    assert (loaded.keys(), meta) == ({"weights"}, {}), "the first of what is asked for"


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_and_every_cut_is_found_and_named(name: str, tmp_path: Path) -> None:
    folder = alone(tmp_path, 40)
    file = folder / name
    whole = file.read_bytes()
    size = len(whole)
    broken = {
        f"flip {at}": whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        for at in {0, 9, *range(5, size, 41), size - 1}
    }
    broken |= {f"cut to {length}": whole[:length] for length in (0, 1, size // 2, size - 1)}
    for how, content in broken.items():
        file.write_bytes(content)
        problem = reader.verify(folder)
        assert "\n" not in problem
        assert problem.startswith(f"{name}: "), how
    assert f"step_40 is damaged ({problem})" in refused(folder, reader.digest)
    assert problem in refused(folder)
    file.unlink()
    assert reader.verify(folder) == f"{name}: missing"
    file.write_bytes(whole)
    assert reader.verify(folder) == ""


def test_nothing_to_read_is_one_line(tmp_path: Path) -> None:
    folder = alone(tmp_path / "checkpoints", 3)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "empty"):
        refused(path)
    (tmp_path / "checkpoints" / "latest").write_text("../elsewhere")
    assert "no checkpoint is there" in refused(tmp_path)
    (tmp_path / "checkpoints" / "latest").write_text("step_4")
    assert "step_4 is damaged (manifest.json: missing)" in refused(tmp_path)
    (folder / "manifest.json").write_text('{"model.safetensors": {"bytes": 1}}')
    assert "manifest.json: cannot be read" in refused(folder)
    torch.save({"a": torch.ones(1)}, tmp_path / "pickled")
    assert "python -m utils.checkpoint import" in refused(tmp_path / "pickled")


@pytest.mark.parametrize("ranks", [3, 8])
def test_any_number_of_ranks_makes_the_same_files(ranks: int, tmp_path: Path) -> None:
    """Which the library reads in one line."""
    assert together(tmp_path, ranks, 7, splits=True) == [""] * ranks
    folder, other = tmp_path / "step_7", alone(tmp_path / "alone", 7)
    assert names(folder) == {*FILES}
    for name in names(folder) - {"meta.json", "manifest.json"}:
        assert (folder / name).read_bytes() == (other / name).read_bytes()
    assert torch.equal(load_file(folder / "model.safetensors")["weight"], torch.full((40, 30), 7.0))
    assert reader.digest(tmp_path) == reader.digest(other)


def test_the_digest_tells_every_tensor(tmp_path: Path) -> None:
    """Other names, types, shapes or values make another digest; other meta does not."""
    folder = alone(tmp_path, 1)
    first = reader.digest(tmp_path)
    for name in ("model", "shards"):
        file = folder / f"{name}.safetensors"
        whole, seen = file.read_bytes(), {first}
        base = load_file(file)
        key = sorted(base)[-1]
        for changed in (
            {**base, key: base[key] + 1},
            {**base, key: base[key].flatten()[None, None]},
            {**base, key: torch.zeros(base[key].shape, dtype=torch.float64)},
            {**base, "new": base[key].clone()},
            {each: tensor for each, tensor in base.items() if each != key},
        ):
            save_file(changed, file)
            declare(folder)
            seen.add(reader.digest(folder))
        assert len(seen) == 6
        file.write_bytes(whole)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "threads": 7, "code": "other"}))
    declare(folder)
    assert reader.digest(tmp_path) == first


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"config": {"arch": ["x"]}}, "config.arch=['x']: Input should be a valid dictionary"),
        ({"data": [3]}, "data=[3]: Input should be a valid dictionary"),
        ({"step": "x"}, "step=x: Input should be a valid integer"),
    ],
)
def test_a_meta_of_other_types_is_damaged(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = alone(tmp_path, 1)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))
    declare(folder)
    with pytest.raises(ConfigError, match="step_1 is damaged") as error:
        reader.config_in(str(folder))
    assert f"(meta.json: {problem})" in str(error.value)


def test_the_command_prints_one_digest_or_one_line(tmp_path: Path) -> None:
    folder = alone(tmp_path / "checkpoints", 1)

    def command(*arguments: str) -> tuple[int, str, str]:
        done = launched([sys.executable, "-m", "utils.checkpoint", *arguments])
        return done.returncode, done.stdout, done.stderr

    assert command("digest", str(tmp_path)) == (0, reader.digest(folder) + "\n", "")
    file = folder / "ema.safetensors"
    flip(file)
    for arguments, message in (
        (("digest", str(file)), f"{file}: a file alone; give a run folder or a step_* folder"),
        (("digest", str(tmp_path)), "step_1 is damaged (ema.safetensors: sha256 differs)"),
        (("digest", str(tmp_path / "nothing")), "no checkpoint is there"),
        (("digset", "x"), "usage: "),
    ):
        status, out, err = command(*arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_the_digest_needs_no_torch(tmp_path: Path) -> None:
    alone(tmp_path, 1)
    code = (
        f"import sys; from utils.checkpoint import reader; reader.digest({str(tmp_path)!r});"
        " print('torch' in sys.modules)"
    )
    assert run_code(code, check=True).stdout == "False\n"
