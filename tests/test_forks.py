"""What starts ranks for the tests."""

from __future__ import annotations

import _thread
import os
import threading
from pathlib import Path

import pytest

from tests.forks import Forks


@pytest.mark.slow
def test_the_answer_of_an_interrupted_run_is_not_taken_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text("import time\ntime.sleep(100)\n")
    (tmp_path / "speak.py").write_text("print('mine')\n")
    forks, env = Forks(), [dict(os.environ)]
    timer = threading.Timer(2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        forks.run(["sleep.py"], env, tmp_path, 200)
    assert forks.run(["speak.py"], env, tmp_path, 60)[0].stdout == "mine\n"
    forks.close()
