"""Files of a run directory that are pipes, devices or folders: nobody waits for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from utils import files
from utils.errors import ConfigError
from utils.ranks.distributed import Dist
from utils.rundir import append, status
from utils.rundir.directory import Run

KINDS: list[Callable[[Path], object]] = [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir]
SETTINGS = {"mode": "disabled", "project": None, "name": None}

pytestmark = [pytest.mark.timeout(20), pytest.mark.parametrize("put", KINDS)]


def test_only_plain_files_are_read(put: Callable[[Path], object], tmp_path: Path) -> None:
    put(tmp_path / "x")
    for read in (files.open_plain, files.read_bytes, files.read_text):
        with pytest.raises(OSError, match=r"not a plain file|Is a directory"):
            read(tmp_path / "x")


def test_a_status_that_is_none(put: Callable[[Path], object], tmp_path: Path) -> None:
    put(tmp_path / status.FILE)
    assert (status.state_of(tmp_path), status.other_writer(tmp_path), status.started_again(tmp_path)) == ("", "", False)


def test_metrics_that_are_none(put: Callable[[Path], object], tmp_path: Path) -> None:
    put(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match=r"not a plain file|Is a directory"):
        append.keep_rows(tmp_path / "metrics.jsonl", 5, False)
    with pytest.raises(ConfigError, match=r"^checkpoint_path=.*: metrics.jsonl there is no regular file; move it away, or give another"):
        Run(tmp_path, Dist()).begin("x: 1\n", SETTINGS, resumed=5)


def test_a_record_of_the_code_that_is_none(put: Callable[[Path], object], tmp_path: Path) -> None:
    put(tmp_path / "git.txt")
    run = Run(tmp_path, Dist())
    run.begin("x: 1\n", SETTINGS, resumed=5)
    run.close()
