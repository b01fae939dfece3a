"""Identifies the code that runs: revision, branch, uncommitted changes. Empty without git."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from utils.errors import visible
from utils.files import ROOT, read_text, write_whole

LIMIT = 10_000_000  # characters of a diff worth keeping
LARGEST_SOURCE = 1_000_000  # bytes of an untracked file that is kept
SOURCES = {".py", ".pyi", ".yaml", ".yml", ".toml", ".sh", ".slurm", ".c", ".cu", ".cpp"}
LEFT_OUT = "# untracked, left out: "


def revision() -> str:
    """The commit that is checked out, or an empty text."""
    return _git("rev-parse", "HEAD").strip()


@functools.cache
def summary() -> str:
    """Revision, branch and whether there are uncommitted changes, one a line; empty outside a
    checkout.

    Cached at the start: code that changes later is not what runs.
    """
    if not (commit := revision()):
        return ""
    dirty = "yes" if _git("status", "--porcelain", "--", ".").strip() else "no"
    return (
        f"revision: {commit}\nbranch:"
        f" {_git('rev-parse', '--abbrev-ref', 'HEAD').strip()}\nuncommitted changes: {dirty}\n"
    )


def uncommitted() -> str:
    """The diff against HEAD with untracked sources as new files, preceded by comments, which
    `git apply` skips, that name the untracked files left out.
    """
    names = _git("ls-files", "--others", "--exclude-standard", "-z", "--", ".").split("\0")[:-1]
    kept = [name for name in names if _is_small_source(name)]
    with tempfile.TemporaryDirectory() as folder:
        env = {}
        if kept:  # in an index of our own, so that the user's stays as it is
            index = Path(folder) / "index"
            with suppress(OSError):
                shutil.copy2(ROOT / _git("rev-parse", "--git-path", "index").strip(), index)
            env = {"GIT_INDEX_FILE": str(index)}
            _git("add", "--intent-to-add", "--", *kept, **env)
        diff = _git("diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".", **env)
    if len(diff) > LIMIT:
        diff = diff[:LIMIT] + "\n# cut here\n"
    left_out = sorted({*names} - {*kept})
    return "".join(f"{LEFT_OUT}{visible(name)}\n" for name in left_out) + diff


def record(directory: Path) -> str:
    """Writes git.txt and uncommitted.diff.

    Returns the name to which an earlier git.txt was moved, if the run began with other code.
    """
    if not (text := summary()):
        return ""
    now, old = {"git.txt": text, "uncommitted.diff": uncommitted()}, ""
    before = {name: read_text(directory / name) for name in now if (directory / name).exists()}
    if "git.txt" in before and _code(before) != _code(now):
        number = next(n for n in itertools.count(1) if not _old(directory, "git.txt", n).exists())
        for name in before:
            (directory / name).rename(_old(directory, name, number))
        old = _old(directory, "git.txt", number).name
    for name, content in now.items():
        write_whole(directory / name, content)
    return old


def _old(directory: Path, name: str, number: int) -> Path:
    stem, suffix = name.split(".")
    return directory / f"{stem}.old-{number}.{suffix}"


def _code(record: Mapping[str, str]) -> tuple[str, list[str]]:
    """Revision and changes, without the names of files left out, which come and go."""
    changes = record.get("uncommitted.diff", "").splitlines()
    return record["git.txt"].splitlines()[0], [
        line for line in changes if not line.startswith(LEFT_OUT)
    ]


def _is_small_source(name: str) -> bool:
    path = ROOT / name
    return path.suffix in SOURCES and path.is_file() and path.stat().st_size <= LARGEST_SOURCE


def code_hashes() -> dict[str, str]:
    """A short hash of every file that decides what a run does, by path; tests do not."""
    files = [ROOT / "contract.py", ROOT / "pretrain.py", *(ROOT / "conf").rglob("*.yaml")]
    for package in ("data", "models", "optim", "utils"):
        files += _package(ROOT / package)
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(files)
        if path.is_file()
    }


def _git(*words: str, **variables: str) -> str:
    # No optional locks: a run must not get in the way of a commit that is being made.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", **variables}
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=ROOT,
            env=env,
            capture_output=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _package(folder: Path) -> list[Path]:
    # Datasets lie in data/ too, thousands of files: only folders that are packages are entered.
    inner = [path for path in folder.iterdir() if (path / "__init__.py").is_file()]
    return [*folder.glob("*.py"), *(path for sub in inner for path in _package(sub))]
