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

from utils.files import ROOT, read_text, write_whole

FILES = ("git.txt", "uncommitted.diff")  # in a run's directory
DIFF_LIMIT = 10_000_000  # characters of a diff worth keeping
# untracked files that are kept: others may be data, and large
SOURCES = ("*.py", "*.pyi", "*.yaml", "*.yml", "*.toml", "*.sh", "*.slurm", "*.c", "*.cu", "*.cpp")


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
    branch = _git("rev-parse", "--abbrev-ref", "HEAD").strip()
    changed = "yes" if _git("status", "--porcelain", "--", ".").strip() else "no"
    return f"revision: {commit}\nbranch: {branch}\nuncommitted changes: {changed}\n"


def uncommitted() -> str:
    """The diff against HEAD, with untracked sources as new files."""
    listed = _git("ls-files", "--others", "--exclude-standard", "-z", "--", *SOURCES)
    names = listed.split("\0")[:-1]
    with tempfile.TemporaryDirectory() as folder:
        env = {}
        if names:  # in an index of our own, so that the user's stays as it is
            index = Path(folder) / "index"
            with suppress(OSError):
                shutil.copy2(ROOT / _git("rev-parse", "--git-path", "index").strip(), index)
            env = {"GIT_INDEX_FILE": str(index)}
            _git("add", "--intent-to-add", "--", *names, **env)
        diff = _git("diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".", **env)
    return diff if len(diff) <= DIFF_LIMIT else f"{diff[:DIFF_LIMIT]}\n# cut here\n"


def record(directory: Path) -> str:
    """Writes git.txt and uncommitted.diff.

    Returns the name to which an earlier git.txt was moved, if the run began with other code.
    """
    if not (text := summary()):
        return ""
    now, old = dict(zip(FILES, (text, uncommitted()), strict=True)), ""
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


def _code(record: Mapping[str, str]) -> tuple[str, str]:
    """Revision and changes: a branch may have got another name since."""
    return record["git.txt"].partition("\n")[0], record.get("uncommitted.diff", "")


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
    files = [*folder.glob("*.py")]
    for inner in folder.iterdir():
        # data/ also has datasets of thousands of files: only folders that are packages are entered
        if (inner / "__init__.py").is_file():
            files += _package(inner)
    return files
