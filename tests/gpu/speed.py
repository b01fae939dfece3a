"""How fast the real training step is: `python -m tests.gpu.speed FILE key=value …` trains, measures
and writes FILE as JSON.

`Trainer.train_step` is called as ever, and looked at from outside: steps to warm up, steps that
are timed from one's beginning to the next one's, one in which PyTorch reports where the host waits
for the device, one under the profiler.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import pretrain
from tests.ranks import ROOT
from utils.command import cli
from utils.measure import hardware

WARM, TIMED, KERNELS = 6, 30, 12
LIMIT_S = 60.0  # fewer are timed where steps are long

Step = Callable[[pretrain.Trainer, list[dict]], Any]


class Measured:
    """In place of `train_step`."""

    def __init__(self, step: Step, file: Path) -> None:
        self._step, self._file, self._calls = step, file, 0
        self._marks: list[Any] = []  # the beginnings of timed steps
        self._began = time.perf_counter()
        self._found: dict[str, Any] = {}

    def __call__(self, trainer: pretrain.Trainer, parts: list[dict]) -> Any:
        self._calls += 1
        if self._calls == 1:
            began = time.perf_counter()
            verdict = self._step(trainer, parts)
            self._found["first_step_s"] = time.perf_counter() - began
            return verdict
        if self._calls == WARM + 1:
            self._begin(trainer)
        if self._calls > WARM:
            self._mark(trainer.dist.device)
            if len(self._marks) > TIMED or (
                len(self._marks) > 3 and time.perf_counter() - self._began > LIMIT_S
            ):
                self._finish(trainer, parts)
        return self._step(trainer, parts)

    def _begin(self, trainer: pretrain.Trainer) -> None:
        self._began = time.perf_counter()
        if trainer.dist.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _mark(self, device: torch.device) -> None:
        if device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def _finish(self, trainer: pretrain.Trainer, parts: list[dict]) -> None:
        device = trainer.dist.device
        if device.type == "cuda":
            torch.cuda.synchronize()
            spans = [
                begin.elapsed_time(end)
                for begin, end in zip(self._marks, self._marks[1:], strict=False)
            ]
        else:
            spans = [
                1e3 * (end - begin)
                for begin, end in zip(self._marks, self._marks[1:], strict=False)
            ]
        ms, batch = statistics.median(spans), trainer.source.length.examples_per_update
        flops = trainer.flops_per_example * batch
        peak = hardware.peak_flops(device, trainer.objective.dtype)
        self._found |= {
            "parameters": sum(p.numel() for p in trainer.objective.parameters()),
            "batch": batch,
            "steps": len(spans),
            "step_ms": ms,
            "fastest_ms": min(spans),
            "examples_per_s": batch / ms * 1e3,
            "flops": flops,
            "mfu": flops / ms * 1e3 / peak if peak else None,
            "peak_bytes": hardware.peak_memory(device),
            "dtype": str(trainer.objective.dtype).removeprefix("torch."),
        }
        self._found["waits"] = (
            waits(lambda: self._step(trainer, parts)) if device.type == "cuda" else None
        )
        self._found["kernels"] = kernels(lambda: self._step(trainer, parts), device)
        self._file.write_text(json.dumps(self._found))
        sys.exit(0)


def waits(call: Callable[[], object]) -> dict[str, int]:
    """How often the host waited for the device, by the line of ours, or else of PyTorch's, that
    made it.
    """
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(
        Counter(
            place(each.filename, each.lineno)
            for each in caught
            if "called a synchronizing" in str(each.message)
        )
    )


def place(file: str, line: int) -> str:
    """As short as it is clear."""
    path = Path(file)
    short = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-2:])
    return f"{short}:{line}"


def kernels(
    call: Callable[[], object], device: torch.device
) -> list[tuple[str, int, float, float]]:
    """Returns the kernels (on a CPU the operations) that took most time: name, calls, milliseconds,
    share.
    """
    cuda = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    ) as seen:
        call()
        if cuda:
            torch.cuda.synchronize()
    spent = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [each for each in seen.key_averages() if not cuda or is_kernel(each)]
    events.sort(key=lambda each: getattr(each, spent), reverse=True)
    total = sum(getattr(each, spent) for each in events) or 1.0
    return [
        (each.key, each.count, getattr(each, spent) / 1e3, getattr(each, spent) / total)
        for each in events[:KERNELS]
    ]


def is_kernel(event: Any) -> bool:
    """And no operation or named stretch of the program, which have the time of kernels as theirs,
    too.
    """
    return event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation


def main() -> None:
    file, *arguments = sys.argv[1:]
    measured = Measured(pretrain.Trainer.train_step, Path(file))
    pretrain.Trainer.train_step = lambda trainer, parts: measured(trainer, parts)
    sys.argv = ["pretrain.py", *arguments]
    cli.main(pretrain.app)


if __name__ == "__main__":
    main()
