"""A trace of a few steps, by PyTorch's profiler, for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WAITS, WARMS_UP = 2, 1  # steps before the trace: the first ones allocate and compile


@contextmanager
def traced(steps: int | None, folder: Path, say: Callable[[str], None]) -> Iterator[Callable]:
    """Yields what is called after each step. Writes `trace.json` after a few steps, or at the end
    of a run that is shorter.

    Called on rank 0 alone with a number of steps; other ranks are not traced.
    """
    if steps is None:
        yield lambda: None
        return

    def write(profiler: profile) -> None:
        aside = folder / ".trace.json.writing"
        profiler.export_chrome_trace(str(aside))
        aside.replace(folder / "trace.json")
        say(f"trace of {steps} steps: {folder / 'trace.json'}")

    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] * torch.cuda.is_available()
    plan = schedule(wait=WAITS, warmup=WARMS_UP, active=steps, repeat=1)
    with profile(activities=kinds, schedule=plan, on_trace_ready=write) as profiler:
        yield profiler.step
