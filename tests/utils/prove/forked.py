"""A proof whose runs are forks of this process, which has imported all that they need, interrupted
when its second run is under way: `python -m tests.utils.prove.forked key=value …`.
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from utils.prove import runs
from utils.prove.__main__ import main


def interrupt(proof: int) -> None:
    while not list(Path("runs").glob("*/again")):
        time.sleep(0.02)
    os.kill(proof, signal.SIGINT)


if __name__ == "__main__":
    print(me := os.getpid())
    runs.STARTED = runs.FORKED = multiprocessing.get_context("fork")
    runs.FORKED.Process(target=interrupt, args=(me,), daemon=True).start()
    sys.exit(main(sys.argv[1:]))
