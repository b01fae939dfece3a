"""Files are replaced whole; pipes and devices in their places hold up nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from utils import files


@pytest.mark.parametrize(
    ("content", "written"),
    [("é\n", "é\n".encode()), (b"\xff\x00", b"\xff\x00"), (os.fsdecode(b"\xff"), b"\xff")],
)
def test_a_file_is_replaced_at_once(content: str | bytes, written: bytes, tmp_path: Path) -> None:
    files.write_whole(tmp_path / "x", "before")
    with open(tmp_path / "x", "rb") as reader:
        files.write_whole(tmp_path / "x", content)
        assert reader.read() == b"before"
    assert (tmp_path / "x").read_bytes() == written
    (tmp_path / "y").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        files.write_whole(tmp_path / "y", content)
    assert sorted(os.listdir(tmp_path)) == ["x", "y"], "nothing is left beside it"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_plain_files_are_read(put: Callable[[Path], object], tmp_path: Path) -> None:
    put(tmp_path / "x")
    for read in (files.open_plain, files.read_bytes, files.read_text):
        with pytest.raises(OSError, match="not a plain file"):
            read(tmp_path / "x")
