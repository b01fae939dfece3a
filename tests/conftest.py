"""Shared by all tests."""

import signal
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from data.build import sudoku
from data.language import tokens
from tests import ranks
from tests.browser import chromium
from tests.data.recursive.helpers import ragged_groups, write_dataset
from tests.forks import Forks
from tests.runs import INTERRUPTED, TINY_GPT, TINY_PAIRS, TINY_TMS, TROUBLED, Once, Result, train

# what a script starts with & ignores Ctrl-C, as would each command that a test interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real runs first: where what is left at the end is small, processes side by side end
    together.
    """
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """The process that starts ranks in tests, for as long as the tests last."""
    started = Forks()
    ranks.forks = started
    yield
    ranks.forks = None
    started.close()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same numbers whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def python_text() -> Iterator[None]:
    """Python's own library becomes tokens once for all tests of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "python_text", cache(tokens.python_text))
        yield


@pytest.fixture(scope="session")
def sudoku_9x9(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small built dataset in HRM's format."""
    folder = tmp_path_factory.mktemp("sudoku") / "tiny"
    made = "--size 9 --train 24 --test 8 --num-aug 2"
    assert sudoku.main([*made.split(), "--output-dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups of one to three puzzles of one to six examples, each puzzle with its own id, as in
    ARC.
    """
    folder = tmp_path_factory.mktemp("ragged") / "set"
    write_dataset(folder, ragged_groups(40))
    write_dataset(folder, ragged_groups(7), split="test")
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Trains a run when a test first asks for it; later ones get the same, as it is."""
    folder, runs = tmp_path_factory.mktemp("once"), dict[tuple[Any, ...], Result]()

    def trained(*arguments: str, ranks: int = 1) -> Result:
        key = (ranks, *arguments)
        if key not in runs:
            name = f"{len(runs)}-{arguments[0].partition('=')[2]}"  # such as 0-gpt
            runs[key] = train(folder / name, *arguments, ranks=ranks)
        return runs[key]

    return trained


@pytest.fixture(scope="session")
def undisturbed(once: Once) -> Result:
    """One rank's uninterrupted run."""
    return once(*INTERRUPTED)


@pytest.fixture(scope="session")
def undisturbed_pair(once: Once) -> Result:
    """A run of two ranks to which nothing happens."""
    return once(*TROUBLED, ranks=2)


@pytest.fixture(scope="session")
def tms_target(once: Once) -> Path:
    """A toy model of superposition, hardly trained."""
    return once(*TINY_TMS, "data.probability=0.3").directory


@pytest.fixture(scope="session")
def gpt_target(once: Once) -> Path:
    """A tiny language model, hardly trained."""
    return once(*TINY_GPT, "max_steps=3", "data.max_new_tokens=0").directory


@pytest.fixture(scope="session")
def readers(gpt_target: Path, once: Once) -> str:
    """Two of them, of other widths and tokenizers, as arch.readers takes them."""
    pairs = once(*TINY_PAIRS, "max_steps=3", "data.max_new_tokens=0").directory
    return f"[{gpt_target},{pairs}]"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system that a test may fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here (needs root): {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched
