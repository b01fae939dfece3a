"""C files compiled on demand."""

import concurrent.futures
import ctypes
import shutil
from pathlib import Path

import pytest

from utils import native

ADD = "int add(int a, int b) { return a + b; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "add.c").write_text(ADD)
    return tmp_path / "add.c"


def compiled(source: Path) -> ctypes.CDLL | None:
    return native.library.__wrapped__(source)  # as another process would


def built(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "lockstep").iterdir())


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_file_is_compiled_once_for_each_version(source: Path, monkeypatch: pytest.MonkeyPatch):
    with concurrent.futures.ThreadPoolExecutor(3) as several:
        made = list(several.map(compiled, [source] * 3))
    assert [library.add(2, 3) for library in made] == [5, 5, 5]
    assert len(built(source)) == 1, "what was compiled aside is gone"
    with monkeypatch.context() as without:
        without.setattr(native, "_compile", None)
        assert compiled(source).add(2, 3) == 5
    source.write_text(ADD.replace("a + b", "a - b"))
    assert compiled(source).add(2, 3) == -1
    assert len(built(source)) == 2


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_library_cut_short_is_compiled_again(source: Path):
    native.cache_folder()
    compiled(source)
    (library,) = built(source)
    library.unlink()  # it is mapped: another file in its place
    library.write_bytes(b"\x7fELF")
    assert compiled(source).add(2, 3) == 5


@pytest.mark.parametrize("compiler", ["", "no-such-compiler", "false", "'"])
def test_without_a_compiler_there_is_no_library(source: Path, monkeypatch, compiler: str):
    monkeypatch.setenv("CC", compiler)
    assert compiled(source) is None


def test_without_a_folder_there_is_no_library(source: Path, monkeypatch):
    (source.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "file"))
    assert compiled(source) is None
