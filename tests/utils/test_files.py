"""Files are replaced whole; pipes and devices in their places hold up nobody."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from utils import files
from utils.errors import ConfigError


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
    with pytest.raises(ConfigError, match="x: not a plain file; remove it"):
        files.read_json(tmp_path / "x", files.OBJECT, "remove it")


DEEP = "[" * 10_000 + "]" * 10_000


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "Invalid JSON: EOF while parsing a value at line 1 column 0"),
        ("[]", "Input should be an object"),
        (f'{{"a": {DEEP}}}', "Invalid JSON: recursion limit exceeded at line 1 column 206"),
        (f'{{"a": "{"x" * 20_000}"}}', "more than 20,000 bytes"),
    ],
)
def test_json_that_is_wrong_is_one_line(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(content)
    with pytest.raises(ConfigError) as error:
        files.read_json(tmp_path / "x", files.OBJECT, "write it again", limit=20_000)
    if "limit" not in problem:
        assert str(error.value) == f"{tmp_path}/x: {problem}; write it again"
    assert files.read_row(tmp_path / "x") == {} or len(content) > 20_000


def test_json_may_begin_with_a_byte_order_mark() -> None:
    assert files.parse_json(b'\xef\xbb\xbf{"a": 1}', files.OBJECT) == {"a": 1}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: &a [*a]", "has an alias"),
        ("a: &a [x]\n<<: {b: *a}", "has an alias"),
        (f"a: {DEEP}", "nested too deeply"),
        ("a: [", "did not find expected node content"),
        ("a: !!bool x", "x"),
        ("a: !!timestamp x", "groupdict"),
        ("- a", "valid dictionary"),
    ],
)
def test_yaml_that_is_wrong_is_one_line(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(content)
    with pytest.raises(ConfigError, match=problem) as error:
        files.read_yaml(tmp_path / "x")
    assert str(error.value).startswith(f"{tmp_path}/x: ")
    assert "\n" not in str(error.value)
