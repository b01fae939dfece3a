"""A file of tensors is known from a pickle by what it is, whatever bytes the length of its header
has.
"""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from utils.checkpoint import reader, tensorfiles
from utils.checkpoint.tensorfiles import Unreadable
from utils.errors import ConfigError


def written(file: Path, length: int) -> None:
    """A file of one tensor whose header has this length."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(length.to_bytes(8, "little") + header.ljust(length) + b"\0\0\x80\x3f")


def test_every_length_of_a_header_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for length in (*range(80, 80 + 256), 0x8002, 0x800280, 0x5D80, 0x4B50):
        written(file, length)
        assert tensorfiles.read(file)["weight"].item() == 1.0, length
        assert tensorfiles.entries(file)["weight"].start == 8 + length
    written(file, int.from_bytes(b"PK\3\4", "little"))
    assert file.read_bytes()[:4] == b"PK\3\4"
    assert tensorfiles.read(file)["weight"].item() == 1.0


def test_real_files_of_every_length_the_library_writes(tmp_path: Path) -> None:
    file, lengths = tmp_path / "model.safetensors", set()
    for width in range(1, 400, 8):
        save_file({"n" * width: torch.ones(1)}, file)
        lengths.add(file.read_bytes()[0])
        (loaded,) = reader.load(file, ["model"])[0]["model"].values()
        assert loaded.item() == 1.0
    assert lengths == set(range(0, 256, 8)), "the library pads the header to eight bytes"
    save_file({f"w{i}": torch.zeros(1) for i in range(77)}, file)
    assert file.read_bytes()[0] == 0x80
    assert len(reader.load(file, ["model"])[0]["model"]) == 77


def pickles() -> dict[str, bytes]:
    state = {"weight": torch.ones(3), "name": "x"}
    made = {
        f"protocol {number}": pickle.dumps({"a": list(range(50)), "b": "text"}, protocol=number)
        for number in range(6)
    }
    made |= {
        f"reduced {number}": pickle.dumps(torch.float32, protocol=number) for number in range(6)
    }
    for zipped in (True, False):
        for number in (2, 3, 4, 5):
            content = io.BytesIO()
            torch.save(
                state, content, pickle_protocol=number, _use_new_zipfile_serialization=zipped
            )
            made[f"torch.save zipped={zipped} {number}"] = content.getvalue()
    return made


@pytest.mark.parametrize("name", ["x.safetensors", "step_52080"])
def test_pickles_of_every_kind_are_refused_with_help(name: str, tmp_path: Path) -> None:
    for kind, content in pickles().items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            ConfigError,
            match=rf"^checkpoint=.*{name} is a pickle, .*python -m utils.checkpoint import .*$",
        ) as caught:
            reader.load(tmp_path / name)
        assert "\n" not in str(caught.value), kind
    named = tmp_path / "a-name-that-is-rather-long-for-a-file"
    torch.save({"a": torch.ones(1)}, named)  # the zip begins with the name
    with pytest.raises(ConfigError, match="is a pickle"):
        reader.load(named)


def test_what_is_neither_is_called_damaged(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    noise = bytes(torch.randint(256, (5000,), dtype=torch.uint8).tolist())
    for content in (
        b"",
        b"\x80",
        b"\x80" * 100,
        b"\xff" * 100,
        noise,
        b"PK\3\4" + noise,
        b"a text\n" * 100,
        b"\0" * 100,
    ):
        file.write_bytes(content)
        for read in (tensorfiles.read, tensorfiles.entries):
            with pytest.raises(Unreadable, match=r"^is damaged or cut short \("):
                read(file)


def test_two_names_that_are_one_without_the_compilers_prefix(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "_orig_mod.a": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="the same names with and without _orig_mod"):
        reader.load(tmp_path / "x.safetensors")
