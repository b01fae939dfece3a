"""Checkpoints in parts: each rank writes its own, and whatever happens to one of them is found."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.utils.checkpoint.helpers import alone, declare, groups, together
from tests.utils.checkpoint.ranks_writer import value_of
from utils.checkpoint import reader, tensorfiles, writer
from utils.checkpoint.slices import Slice, deal
from utils.checkpoint.tensorfiles import Unreadable
from utils.errors import ConfigError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, by three ranks each."""
    directory = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        assert together(directory, 3, step) == [""] * 3
    return directory


def test_each_rank_writes_a_third_and_the_digest_is_that_of_one_rank(
    saved: Path, tmp_path: Path
) -> None:
    files = {file.name: file.stat().st_size for file in (saved / "step_2").glob("*.safetensors")}
    assert {"model.0.safetensors", "model.1.safetensors", "model.2.safetensors"} <= files.keys()
    sizes = [files[f"model.{rank}.safetensors"] for rank in range(3)]
    assert max(sizes) < 1.4 * min(sizes), sizes
    assert reader.digest(saved) == reader.digest(alone(tmp_path, 2))
    assert value_of(saved / "step_2") == 2.0
    loaded = reader.load(saved)[0]
    for name, members in groups(2.0).items():
        assert loaded[name].keys() == members.keys()
        assert all(torch.equal(loaded[name][key], tensor) for key, tensor in members.items())


def test_other_programs_read_the_parts(saved: Path) -> None:
    """Each is a safetensors file of its own, and its header says which rows it holds."""
    rows = 0
    for rank in range(3):
        with safe_open(saved / "step_2" / f"model.{rank}.safetensors", "pt") as file:
            part = file.get_tensor("weight")
            assert f'"weight": [{rows}, 40]' in file.metadata()["rows"]
            rows += len(part)
    assert rows == 40


def test_files_have_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 1000)
    folder = alone(tmp_path / "small", 2)
    sizes = [file.stat().st_size for file in folder.glob("model.0-*.safetensors")]
    assert len(sizes) == 5
    assert max(sizes) < 1000 + 30 * 4 + 400, "content, a row, and a header"
    assert reader.digest(folder) == reader.digest(alone(tmp_path / "large", 2))


def gone(file: Path, other: Path) -> None:
    file.unlink()


def cut(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flipped(file: Path, other: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def of_another_save(file: Path, other: Path) -> None:
    shutil.copyfile(other / file.name, file)


@pytest.mark.parametrize("damage", [gone, cut, flipped, of_another_save])
def test_damage_to_the_file_of_one_rank(
    damage: Callable[[Path, Path], None], saved: Path, tmp_path: Path
) -> None:
    """It is named, whatever rank's it is, and the checkpoint before is taken."""
    for name in [file.name for file in (saved / "step_2").glob("*.safetensors")]:
        run = shutil.copytree(saved, tmp_path / name)
        damage(run / "step_2" / name, run / "step_1")
        said: list[str] = []
        assert reader.newest_whole(run, said.append) == run / "step_1"
        assert len(said) == 1
        assert said[0].startswith(f"checkpoint step_2 is damaged ({name}: ")
        with pytest.raises(ConfigError, match=rf"step_2 is damaged \({name}: "):
            reader.digest(run)


SPOILT: dict[str, tuple[Callable[[dict[str, Slice]], Any], str]] = {
    "too few rows": (
        lambda part: part.update(weight=Slice(part["weight"].tensor[:-1], *part["weight"][1:])),
        "holds weight from row",
    ),
    "other rows": (
        lambda part: part.update(weight=Slice(part["weight"].tensor, 0, 40)),
        "holds weight from row",
    ),
    "of a larger tensor": (
        lambda part: part.update(weight=Slice(*part["weight"][:2], 41)),
        "holds another weight than",
    ),
    "of another type": (
        lambda part: part.update(weight=Slice(part["weight"].tensor.double(), *part["weight"][1:])),
        "holds another weight than",
    ),
    "a tensor twice": (
        lambda part: part.update(half=Slice.whole(torch.ones(1, dtype=torch.bfloat16))),
        "holds half from row 0 on, and the others up to 1",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_parts_that_do_not_make_a_whole(name: str, saved: Path, tmp_path: Path) -> None:
    """Although the manifest vouches for them."""
    spoil, problem = SPOILT[name]
    folder = shutil.copytree(saved / "step_2", tmp_path / "step_2")
    file = folder / "model.1.safetensors"
    held = {
        key: Slice(tensorfiles.read(file)[key], entry.first, entry.of)
        for key, entry in tensorfiles.entries(file).items()
    }
    spoil(held)
    tensorfiles.write(file, held)
    declare(folder)
    assert problem in reader.verify(folder)
    with pytest.raises(ConfigError, match=problem) as caught:
        reader.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "rows", ["[", "[1]", '{"a": 3}', '{"a": [0]}', '{"a": [0, 1]}', '{"a": [-1, 9]}', '{"a": "xy"}']
)
def test_rows_that_no_writer_states(rows: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    from safetensors.torch import save_file

    save_file({"a": torch.ones(4)}, file, {"rows": rows})
    with pytest.raises(Unreadable, match=r"^is damaged or cut short \("):
        tensorfiles.entries(file)


def test_a_disk_that_is_full_for_one_rank_alone(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank publishes, nothing is left lying about, and the next save is whole."""
    run, write = shutil.copytree(saved, tmp_path / "run"), writer.write

    def full(file: Path, slices: dict[str, Slice]) -> Any:
        if file.name == "model.2.safetensors":
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, slices)

    monkeypatch.setattr(writer, "write", full)
    assert together(run, 3, 3) == ["rank 2: No space left on device"] * 3
    assert sorted(each.name for each in run.iterdir()) == ["latest", "step_1", "step_2"]
    monkeypatch.undo()
    assert together(run, 3, 4) == [""] * 3
    assert reader.newest_whole(run, pytest.fail) == run / "step_4"


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_tensors_are_dealt_evenly_and_wholly(parts: int) -> None:
    tensors = {
        "large": torch.arange(600.0).view(100, 6),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(5),
        "no content": torch.empty(4, 0),
        "wide": torch.ones(2, 50),
        "last": torch.empty(0),
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    shares = deal({name: Slice.whole(tensor) for name, tensor in tensors.items()}, parts)
    assert len(shares) == parts
    for name, tensor in tensors.items():
        pieces = [part[name] for part in shares if name in part]
        if len(pieces) > 1:
            tensor_ = torch.cat([piece.tensor for piece in pieces])
            assert [piece.first for piece in pieces] == [
                sum(len(piece.tensor) for piece in pieces[:number]) for number in range(len(pieces))
            ]
        else:
            tensor_ = pieces[0].tensor
        assert torch.equal(tensor_, tensor)
        assert {piece.of for piece in pieces} == {len(tensor) if tensor.ndim else 1}
    for part in shares:
        size = sum(piece.tensor.nbytes for piece in part.values())
        assert size < total / parts + 2 * 50 * 4, "a row more at most, at either end"
