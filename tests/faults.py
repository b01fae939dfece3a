"""Runs pretrain.py with a fault at a chosen moment on a chosen rank.

`python -m tests.faults WHAT@WHERE RANK WHEN key=value …`

WHAT: raise, hang, slow (by 0.2 s), stall (for 12 s), kill, kill-now, nan, full or readonly (the
disk that FAULT_DISK names), wandb (its process is killed), suspend (for 10 s), another (disk in the
place that FAULT_DISK names, as on another host), a signal such as SIGTERM, several
(SIGINT+pause+SIGINT), or `launcher:SIGTERM` for one to the launcher.

WHERE: objective (a training step), predict (an evaluation batch), data (the source's constructor),
worker (a batch in a loader process), callback (a hook of the sparse optimizer), gather (a tensor on
its way to rank 0, which saves it), save (before rank 0 writes), published (when everything is on
its disk).

RANK is a number or `all`. WHEN counts calls in this process from 0: `7`, `1-2`, or `3-` for all
from there. A torchrun restart has no fault, unless RANK is `random`: then WHEN is a seed, and each
of the first restarts has another fault. With FAULT_LATE in the environment the host learns about
gradients that are not finite one step late, as it does on CUDA; FAULT_WITHOUT names a package that
is not there.
"""

import ctypes
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch

import pretrain
from data.recursive.puzzles import PuzzleSource
from models.decomposition.decompose import Decompose
from models.language.causal_lm import CausalLM
from models.latent.compress import Compress
from models.recursive.act import ActObjective
from models.recursive.guessing import GuessObjective
from optim import sparse_signsgd
from optim.sync import base
from utils.checkpoint import writer
from utils.command import cli
from utils.ranks import signals
from utils.ranks.distributed import Dist
from utils.ranks.launchers import detect

PLACES: dict[str, tuple[Any, str]] = {
    "objective": (ActObjective, "forward"),
    "predict": (ActObjective, "predict"),
    "data": (PuzzleSource, "__init__"),
    "worker": (PuzzleSource, "train_batch"),
    "callback": (sparse_signsgd.SparseSignSGD, "_update"),
    "save": (writer, "_write"),
    "gather": (Dist, "to_main"),
    "published": (writer, "_publish"),
}
OTHERS = {
    "arch=gpt": CausalLM,
    "experiment=tms_5_2": Decompose,
    "arch=prefix": Compress,
    "arch=candidates": GuessObjective,
}
FAULTY_RESTARTS = 4  # of a run with random faults
LATEST = 12  # random faults come within so many steps after a start


def main() -> None:
    kind, who, when, *arguments = sys.argv[1:]
    what, _, where = kind.partition("@")
    me, restart = detect(os.environ), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if who == "random":
        draw = random.Random(int(when) + restart)
        rank, moment, delay = (
            draw.randrange(me.world_size),
            draw.randrange(LATEST),
            draw.uniform(0, 0.03),
        )
        if rank == me.rank and restart < FAULTY_RESTARTS:
            plant(what, where, [moment], delay)
    elif who in ("all", str(me.rank)) and restart == 0:
        first, dash, last = when.partition("-")
        plant(what, where, range(int(first), int(last or 10**9 if dash else first) + 1))
    if "FAULT_LATE" in os.environ:
        base.LAG["cpu"] = 1
    if "FAULT_MEMORY" in os.environ:
        writer.free_bytes = lambda: 0
    if "FAULT_WITHOUT" in os.environ:
        sys.modules[os.environ["FAULT_WITHOUT"]] = None  # type: ignore[assignment]
    sys.argv = ["pretrain.py", *arguments]
    cli.main(pretrain.app)


def plant(what: str, where: str, moments: Container[int], delay: float = 0.0) -> None:
    """Make the chosen calls go wrong."""
    owner, name = PLACES[where]
    if owner is ActObjective:
        owner = next((other for argument, other in OTHERS.items() if argument in sys.argv), owner)
    original: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(10**9))

    @functools.wraps(original)  # keys are typed by the signature
    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(calls) not in moments:
            mend(what)
            return original(*args, **kwargs)
        print(f"FAULT {what} {time.monotonic()}", flush=True)
        if what == "nan":
            out = original(*args, **kwargs)
            out.loss.register_hook(lambda grad: grad * float("nan"))
            return out
        go_wrong(what, delay)
        return original(*args, **kwargs)

    setattr(owner, name, faulty)


def go_wrong(what: str, delay: float) -> None:
    if what == "raise":
        raise ZeroDivisionError("a planted error")
    if what == "hang":
        time.sleep(3600)
    elif what == "slow":
        time.sleep(0.2)
    elif what == "stall":
        time.sleep(12)
    elif what == "kill-now":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "kill":  # a moment later, wherever the process then is
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    elif what == "full":
        with open(disk() / "filler", "ab") as filler:
            filler.write(b"x" * shutil.disk_usage(disk()).free)
    elif what == "readonly":
        if os.access(disk(), os.W_OK):
            subprocess.run(["mount", "--bind", disk(), disk()], check=True)
            # refused while this process has a file open for writing there
            remount = ["mount", "-o", "remount,bind,ro", disk()]
            while subprocess.run(remount, check=False).returncode:
                time.sleep(0.02)
    elif what == "suspend":  # as Ctrl-Z and fg, or a scheduler that wants the machine for a while
        pid = os.getpid()
        subprocess.Popen(
            ["sh", "-c", f"sleep 0.7; kill -STOP {pid}; sleep 10; kill -CONT {pid}"],
            start_new_session=True,
        )
        # the others wait for rank 0 before and after
        for _ in range(20 if detect(os.environ).rank == 0 else 0):
            time.sleep(0.1)
    elif what == "another":
        ctypes.CDLL(None).unshare(0x20000)  # what this process mounts, no other sees
        for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "none", disk()]):
            subprocess.run(["mount", *mount], check=True)
    elif what == "wandb":
        kill_wandb()
    elif what.startswith("launcher:"):
        os.kill(os.getppid(), signal.Signals[what.removeprefix("launcher:")])
        deadline = time.monotonic() + 7
        # training would be over before the launcher has done its part
        while not signals.stop_signal() and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        for name in what.split("+"):
            time.sleep(1.5) if name == "pause" else os.kill(os.getpid(), signal.Signals[name])
            time.sleep(0.05)


def mend(what: str) -> None:
    if what == "full":
        (disk() / "filler").unlink(missing_ok=True)
    elif what == "readonly" and not os.access(disk(), os.W_OK):
        subprocess.run(["umount", "--lazy", disk()], check=True)


def disk() -> Path:
    return Path(os.environ["FAULT_DISK"])


def kill_wandb() -> None:
    """Wait for W&B, which starts beside training, and kill it."""
    while not (services := wandb_services()):
        time.sleep(0.1)
    for pid in services:
        os.kill(pid, signal.SIGKILL)


def wandb_services() -> list[int]:
    """The processes of W&B among our descendants."""
    services, parents = [], [os.getpid()]
    while parents:
        for children in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            parents += (pids := [int(pid) for pid in children.read_text().split()])
            services += [
                pid for pid in pids if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
    return services


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
