"""Two stages fill the table, and a rerun does what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import launched


def stages(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = {"OUT": str(folder), "EPOCHS": "1", "WAYS": "exact", "RANKS": "1 2", **variables}
    words = [f"{key}={value}" for key, value in settings.items()]
    return launched(["env", *words, sys.executable, "-m", "tests.bench.stages"], timeout=400)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_two_stages_from_nothing_and_again(tmp_path: Path) -> None:
    done = stages(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "digits-1"
    text = (folder / "stages.md").read_text()
    digests = {
        line.rpartition("| `")[2] for line in text.splitlines() if line.startswith("| `exact=true`")
    }
    assert len(digests) == 1, "the same bits at 1 and 2 ranks"
    assert text.count(" of 360 |") == 3
    assert text in done.stdout
    written = (folder / "exact-2" / "metrics.jsonl").stat().st_mtime_ns
    again = stages(tmp_path)
    assert again.stdout.startswith("\n`python pretrain.py"), "nothing was missing"
    assert (folder / "exact-2" / "metrics.jsonl").stat().st_mtime_ns == written
