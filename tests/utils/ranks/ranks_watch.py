"""One rank of the tests of the watch: `python -m tests.utils.ranks.ranks_watch SCENARIO RANK`.

In most scenarios RANK does something that the others do not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from utils.command import cli
from utils.errors import ConfigError, RunError
from utils.ranks import distributed
from utils.ranks.distributed import Dist

TIMEOUT_S = 3.0
ASKED = sys.argv[1:3]


def forever(dist: Dist, mine: bool = False) -> None:
    while True:
        dist.sums([1.0])
        time.sleep(0.01)


def stuck() -> None:
    while True:
        time.sleep(1)


def fail(dist: Dist, mine: bool, error: type[Exception] = ZeroDivisionError) -> None:
    if mine:
        time.sleep(0.7)
        raise error("cannot")
    forever(dist)


def fail_to_configure(dist: Dist, mine: bool) -> None:
    fail(dist, mine, ConfigError)


def fail_differently(dist: Dist, mine: bool) -> None:
    time.sleep(0 if mine else 1)
    raise ConfigError(f"of rank {dist.rank}")


def fail_alike(dist: Dist, mine: bool) -> None:
    """All ranks find the same; rank 0 is the last to say so."""
    time.sleep(2.5 if dist.is_main else 0)
    raise RunError("the loss is not finite")


def fail_while_others_compute(dist: Dist, mine: bool) -> None:
    if mine:
        raise ZeroDivisionError("cannot")
    if dist.watch is not None:
        dist.watch.last_words = lambda text: print(f"last words: {text}", flush=True)
    stuck()


def leave(dist: Dist, mine: bool) -> None:
    """Some leave earlier than others; nobody needs them any more."""
    time.sleep(1.5)
    dist.sums([1.0])
    time.sleep(0 if mine else 1.5 * (1 + dist.rank % 2))


def stand_still(dist: Dist, mine: bool) -> None:
    if mine:
        pause()
    forever(dist)


def fail_while_rank_0_stands_still(dist: Dist, mine: bool) -> None:
    if dist.is_main:
        pause()
    fail(dist, mine)


def pause() -> None:
    """As Ctrl-Z and, when the others have ended, fg."""
    goes_on = f"sleep {TIMEOUT_S + 5}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", goes_on], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def exit_quietly(dist: Dist, mine: bool) -> None:
    if mine:
        sys.exit(3)
    forever(dist)


def scenario() -> None:
    name, who = ASKED
    dist = distributed.start(device="cpu", timeout_s=TIMEOUT_S)
    dist.sums([1.0])
    globals()[name](dist, dist.rank == int(who))


if __name__ == "__main__":
    del sys.argv[1:]  # which is read as that of a run
    cli.main(scenario)
