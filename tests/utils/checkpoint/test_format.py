"""Files of tensors: what is written is read, by others too, and a stranger's file does no harm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from utils.checkpoint import format
from utils.checkpoint.format import Unreadable
from utils.files import open_plain

TENSORS = {
    "large": torch.arange(600.0).view(100, 6),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(5),
    "no content": torch.empty(4, 0),
    "wide": torch.ones(2, 50, dtype=torch.bfloat16),
    "last": torch.empty(0),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
}


def test_other_programs_read_a_file_and_we_read_theirs(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    ordered = format.in_file_order(TENSORS)
    format.write(file, ordered, iter(ordered.values()))
    theirs = load_file(file)
    assert theirs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert theirs[name].dtype == tensor.dtype
        assert torch.equal(theirs[name].float(), tensor.float()), name
    for width in range(1, 100, 8):  # headers of all lengths, and tensors at odd places
        save_file({"n" * width: torch.arange(7.0), "o": torch.ones(3, dtype=torch.uint8)}, file)
        read = format.read_header(file)["n" * width].read()
        assert torch.equal(read, torch.arange(7.0))
        assert read.data_ptr() % 64 == 0, "BLAS adds in another order where the alignment differs"


def header(**about: Any) -> bytes:
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text


def one(dtype: str = "F32", shape: Any = (4,), offsets: Any = (0, 16), **more: Any) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return header(a=entry, **more) + bytes(16)


HARMFUL = {
    "empty": b"",
    "huge header": (1 << 60).to_bytes(8, "little") + b"{}",
    "beyond the file": one(offsets=(0, 1 << 40), shape=(1 << 38,)),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_strangers_file_is_refused(name: str, tmp_path: Path) -> None:
    """Before anything is read beyond it, or memory taken that it does not fill."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(HARMFUL[name])
    with pytest.raises(Unreadable, match=r"^model.safetensors: "):
        format.read_header(file)


def test_a_type_that_is_not_known_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(one("F8_E8M0", (16,)))
    with pytest.raises(Unreadable, match="F8_E8M0 is a type that is not read here"):
        format.read_header(file)["a"].read()


@pytest.mark.parametrize("place", [5, 7])
def test_a_header_that_reads_differently_the_second_time_is_damage(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has read the file and found it right; its length is then more than memory has, or
    more than a file can have.
    """
    file = tmp_path / "x.safetensors"
    file.write_bytes(content := one())
    changed = bytearray(content)
    changed[place] = 255
    (tmp_path / "changed").write_bytes(changed)
    monkeypatch.setattr(format, "open_plain", lambda _: open_plain(tmp_path / "changed"))
    with pytest.raises(Unreadable, match=r"x\.safetensors: cannot be read"):
        format.read_header(file)
