"""pretrain.py with one thing going wrong at a chosen moment on a chosen rank: `python -m tests.faults KIND RANK WHEN key=value …`.

KIND is `<what>@<where>`. What: raise, hang, kill, nan, or a signal such as SIGTERM (twice: SIGTERM+SIGTERM).
Where: objective (of a training step), predict (an evaluation batch), data (the source is made), worker (a batch in a loader
process), callback (a hook of the sparse optimizer), save (in the thread that writes a checkpoint).
RANK is a number or `all`. WHEN counts calls from 0 in this process; a torchrun restart is left in peace.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import pretrain
from data.puzzles import PuzzleSource
from models.objectives.act import ActObjective
from optim import sparse_signsgd
from utils import saver
from utils.launchers import detect

PLACES: dict[str, tuple[Any, str]] = {
    "objective": (ActObjective, "forward"),
    "predict": (ActObjective, "predict"),
    "data": (PuzzleSource, "__init__"),
    "worker": (PuzzleSource, "train_batch"),
    "callback": (sparse_signsgd.SparseSignSGD, "_update"),
    "save": (saver, "_write"),
}


def main() -> None:
    kind, rank, when, *arguments = sys.argv[1:]
    what, _, where = kind.partition("@")
    if rank in ("all", str(detect(os.environ).rank)) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        plant(what, where, int(when))
    sys.argv = ["pretrain.py", *arguments]
    pretrain.main()


def plant(what: str, where: str, when: int) -> None:
    """Have the chosen call go wrong."""
    owner, name = PLACES[where]
    original: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(10**9))

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(calls) != when:
            return original(*args, **kwargs)
        print(f"FAULT {what}", flush=True)
        if what == "nan":
            out = original(*args, **kwargs)
            out.loss.register_hook(lambda grad: grad * float("nan"))
            return out
        go_wrong(what)
        return original(*args, **kwargs)

    setattr(owner, name, faulty)


def go_wrong(what: str) -> None:
    if what == "raise":
        raise ZeroDivisionError("a planted error")
    if what == "hang":
        time.sleep(3600)
    elif what == "kill":  # a moment later, wherever the process then is
        delay = float(os.environ.get("FAULT_DELAY_S", "0"))
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    else:
        for name in what.split("+"):
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(0.05)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
