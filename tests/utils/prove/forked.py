"""A proof whose runs are forks of this process, which has imported all that they need:
`python -m tests.utils.prove.forked SIGNAL key=value …`.

It prints its number, and gets SIGNAL, unless that is 0, when its second run is under way.
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path

from utils.prove import runs
from utils.prove.__main__ import main


def interrupt(proof: int, signum: int) -> None:
    while not list(Path("runs").glob("*/again")):
        time.sleep(0.02)
    os.kill(proof, signum)


if __name__ == "__main__":
    me, signum = os.getpid(), int(sys.argv[1])
    print(me)
    runs.STARTED = runs.FORKED = multiprocessing.get_context("fork")
    if signum:
        runs.STARTED.Process(target=interrupt, args=(me, signum), daemon=True).start()
    sys.exit(main(sys.argv[2:]))
