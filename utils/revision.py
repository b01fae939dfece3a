"""Identifies the code that runs: revision, branch, uncommitted changes. Empty without git."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path

from utils.files import ROOT

LIMIT = 20_000_000  # characters of a diff worth keeping


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
    """The diff against HEAD, preceded by the names of untracked files as comments that `git apply`
    skips.
    """
    names = _git("ls-files", "--others", "--exclude-standard", "--", ".").splitlines()
    diff = _git("diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".")
    if len(diff) > LIMIT:
        diff = diff[:LIMIT] + "\n# cut here\n"
    return "".join(f"# untracked: {name}\n" for name in names) + diff


def code_hashes() -> dict[str, str]:
    """A short hash of every file that decides what a run does, by path; tests do not."""
    files = [ROOT / "pretrain.py", *(ROOT / "conf").rglob("*.yaml")]
    for package in ("data", "models", "optim", "utils"):
        files += _package(ROOT / package)
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(files)
        if path.is_file()
    }


def _git(*words: str) -> str:
    # No optional locks: a run must not get in the way of a commit that is being made.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
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
