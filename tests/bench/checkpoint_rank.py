"""One rank of bench_checkpoint.py: saves, resumes, or does the same with torch's checkpoints."""

import gc
import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from optim.averages import EMA
from optim.builtin import adamw
from optim.optimizer_state import OptimizerState
from tests.utils.checkpoint.helpers import as_it_is
from utils.checkpoint import resume
from utils.checkpoint.registry import Group
from utils.checkpoint.writer import Writer
from utils.command.root import Config
from utils.ranks import distributed
from utils.ranks.distributed import Dist
from utils.transfer import fill

SHARDS, VOCAB, LAYERS, SAVES = 8, 50304, 12, 3


def weights(width: int) -> dict[str, nn.Parameter]:
    """Those of a GPT of 12 layers."""
    torch.manual_seed(0)
    shapes = {"embed": (VOCAB, width)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.qkv": (3 * width, width), f"{layer}.out": (width, width)}
        shapes |= {f"{layer}.up": (4 * width, width), f"{layer}.down": (width, 4 * width)}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


class State:
    """What a run of so many weights has to save."""

    def __init__(self, width: int, dist: Dist) -> None:
        self.weights = weights(width)
        self.optimizer = adamw([*self.weights.items()], 0.1, (0.9, 0.95), 0.1)
        self.ema = EMA(self.weights, 0.999)
        memory = OptimizerState([self.optimizer], self.weights)
        self.registry = as_it_is(
            dist,
            model=Group(lambda: dict(self.weights), self._load),
            ema=Group(self.ema.state, self.ema.load),
            optimizer=Group(memory.state, memory.load, memory.expected),
        )
        self.memory = memory

    def step(self) -> None:
        """The optimizer has something to remember."""
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
            self.optimizer.step()
            weight.grad = None

    def _load(self, saved: Any) -> None:
        for name, weight in self.weights.items():
            fill(weight, saved[name])

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for torch's own checkpoints."""
        groups = {"model": self.weights, "ema": self.ema.state(), "optimizer": self.memory.state()}
        return {
            f"{group}/{name}": tensor.detach()
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        }


def memory_mib(what: str) -> float:
    """VmRSS, or VmHWM, of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def watched(work: Callable[[], None]) -> dict[str, float]:
    """Seconds, and MiB at the peak and afterwards beyond what there was before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    before, started = memory_mib("VmRSS"), time.perf_counter()
    work()
    seconds, peak = time.perf_counter() - started, memory_mib("VmHWM")
    gc.collect()
    return {"s": seconds, "peak": peak - before, "kept": memory_mib("VmRSS") - before}


def save(folder: Path, width: int, dist: Dist) -> dict[str, float]:
    state = State(width, dist)
    state.step()
    writer = Writer(folder / "run" / "checkpoints", dist, print, keep=1)
    rows = []
    for step in range(1, SAVES + 1):

        def saved(step: int = step) -> None:
            writer.save(step, *state.registry.snapshot({"step": step}))
            rows[-1]["stall"] = writer.take_stall_s()
            assert writer.wait() == ""

        dist.sums([1.0])
        writer.take_stall_s()  # waiting for the last one counts as well
        rows.append({})
        rows[-1] |= watched(saved)
    writer.close()
    return summary(rows)


def save_dcp(folder: Path, width: int, dist: Dist) -> dict[str, float]:
    state = State(width, dist)
    state.step()
    rows = []
    for step in range(1, SAVES + 1):
        if dist.is_main:
            shutil.rmtree(folder / "dcp", ignore_errors=True)
        dist.sums([1.0])

        def saved() -> None:
            started = time.perf_counter()
            future = dcp.async_save(state.tensors(), checkpoint_id=str(folder / "dcp"))
            rows[-1]["stall"] = time.perf_counter() - started
            future.result()  # type: ignore[union-attr]

        rows.append({"step": step})
        rows[-1] |= watched(saved)
    return summary(rows)


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Times of later saves; memory of the first, which includes the copy."""
    later = rows[1:] or rows
    return {
        "stall": statistics.median(row["stall"] for row in later),
        "s": statistics.median(row["s"] for row in later),
        "peak": max(row["peak"] for row in rows[:1]),
    }


def load(folder: Path, width: int, dist: Dist) -> dict[str, float]:
    state = State(width, dist)
    path = folder / "run"
    made = {"shards": SHARDS, "resume": "auto", "checkpoint_path": str(path), "eval_only": False}
    config = Config.model_construct(**made, init_from=None, max_steps=99, checkpoint=None)

    def resumed() -> None:
        start = resume.find(config, dist, print)
        resume.restore(start, state.registry, config, print, 99, lambda step: 0.1)

    return watched(resumed)


def load_dcp(folder: Path, width: int, dist: Dist) -> dict[str, float]:
    state = State(width, dist)

    def resumed() -> None:
        state.step()  # it reads into memory that is there
        dcp.load(state.tensors(), checkpoint_id=str(folder / "dcp"))

    return watched(resumed)


def main() -> None:
    role, folder, width = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist = distributed.start(device="cpu", timeout_s=600)
    if not c10d.is_initialized():
        distributed.group(dist)
    roles = {"save": save, "load": load, "save_dcp": save_dcp, "load_dcp": load_dcp}
    row = roles[role](folder, width, dist)
    everyone = [json.loads(text) for text in dist.all_gather_text(json.dumps(row))]
    if dist.is_main:
        print("ROW " + json.dumps(everyone))
    dist.sums([1.0])
    distributed.stop()
    sys.stdout.flush()
    os._exit(0)  # after an asynchronous save of torch's, the interpreter does not come to an end


if __name__ == "__main__":
    main()
