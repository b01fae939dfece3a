"""`tests/ranks.py` reports ranks that fail or hang, and leaves none behind."""

from __future__ import annotations

import time

import pytest

from tests.ranks import check_ended_well, run_ranks


def test_a_failed_rank_is_reported_and_the_others_are_killed(monkeypatch):
    monkeypatch.setattr("tests.ranks.GRACE_S", 0.3)
    script = (
        "import os, sys, time; print('rank', os.environ['RANK']); sys.exit(3) if os.environ['RANK']"
        " == '1' else time.sleep(60)"
    )
    start = time.monotonic()
    waiting, failed = run_ranks(2, ["-c", script])
    assert time.monotonic() - start < 10
    assert (failed.returncode, failed.stdout) == (3, "rank 1\n")
    assert waiting.returncode < 0
    assert "after another rank had failed" in waiting.stderr
    with pytest.raises(AssertionError, match="rank 1 ended with 3"):
        check_ended_well([waiting, failed])


def test_a_time_limit_ends_hung_ranks():
    (hung,) = run_ranks(1, ["-c", "import time; time.sleep(60)"], timeout=0.5)
    assert hung.returncode < 0
    assert "killed after 0.5 s" in hung.stderr
