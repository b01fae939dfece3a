"""Writes checkpoints: rank 0 copies whole tensors, and a thread puts the copy on the disk while
training goes on. Where memory has no room for a copy, rank 0 writes them one by one, and training
waits for the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint import folders
from utils.checkpoint.format import (
    META,
    SUFFIX,
    in_file_order,
    write,
    write_manifest,
    write_text,
)
from utils.errors import brief
from utils.memory import free_bytes
from utils.ranks.distributed import Dist
from utils.ranks.one_by_one import OneByOne

SPARED = 0.1  # of free memory, left for everything else


class Writer:
    """Created on all ranks together; all call its methods at the same steps. Only rank 0 writes,
    and calls `say`, also from its thread.
    """

    def __init__(
        self,
        directory: Path,
        dist: Dist,
        say: Callable[[str], None],
        keep: int | None = 2,
        on_saved: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """`on_saved` is called with every complete checkpoint, on rank 0 and perhaps in its
        thread.
        """
        self.failures = 0  # saves that failed in a row; rank 0 knows
        self._directory, self._dist, self._say = directory, dist, say
        self._keep, self._on_saved = keep, on_saved
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcome, self._stall_s, self._said_that_it_waits = "", 0.0, False
        with dist.agreed():
            if dist.is_main:
                folders.tidy(directory, say)

    def save(
        self, step: int, groups: Mapping[str, OneByOne], meta: Mapping[str, Any], best: bool = False
    ) -> None:
        """Takes a whole copy of the tensors on rank 0 and returns, once the last save is over; a
        thread writes it, or without room for a copy this call. `meta` and `best` count on rank 0.
        """
        with self._dist.waiting(forever=True):
            self._join()
            started = time.perf_counter()
            shapes = {name: in_file_order(group.shapes) for name, group in groups.items()}
            all_tensors = (groups[group][name] for group in shapes for name in shapes[group])
            if self._dist.is_main:
                text = json.dumps({**meta, "step": step, "ranks": self._dist.world_size}, indent=1)
                run = partial(self._run, step, shapes, text + "\n", best)
                self._begin(shapes, all_tensors, run)
            # All ranks go through all tensors, even if rank 0's disk fails, and go on when rank 0
            # does.
            for _ in all_tensors:
                pass
            self._dist.broadcast_text("")
            self._stall_s += time.perf_counter() - started

    def wait(self) -> str:
        """Waits until no save is in progress. Returns why the last one failed, or an empty string;
        the same on all ranks.
        """
        with self._dist.waiting(forever=True):
            self._join()
            return self._dist.broadcast_text(self._outcome)

    def take_stall_s(self) -> float:
        """Returns the seconds for which callers have waited since the last call."""
        taken, self._stall_s = self._stall_s, 0.0
        return taken

    def close(self) -> None:
        """Finishes the current save."""
        self._join()
        self._buffers = {}

    def _join(self) -> None:
        if self._thread is not None:
            started = time.perf_counter()
            self._thread.join()
            self._thread, self._stall_s = None, self._stall_s + time.perf_counter() - started

    def _begin(
        self,
        shapes: Mapping[str, Mapping[str, Tensor]],
        tensors: Iterator[Tensor],
        run: Callable[[Iterator[Tensor], type[Exception]], None],
    ) -> None:
        """Copies the tensors for a thread that runs the save, or runs it now."""
        if self._make_room(shapes):
            buffers, devices = [*self._buffers.values()], set()
            for buffer, tensor in zip(buffers, tensors, strict=False):
                buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                devices |= {tensor.device} if tensor.is_cuda else set()
            for device in devices:
                torch.cuda.current_stream(device).synchronize()
            self._thread = threading.Thread(target=run, args=(iter(buffers), Exception))
            self._thread.start()
        else:
            # an error in gathering a tensor is not one of the disk: the run cannot go on
            run((_buffer(each).copy_(each) for each in tensors), OSError)

    def _make_room(self, shapes: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """Makes buffers for a copy, or keeps those of the last save, because fresh pages cost more
        than the copy. Returns False if memory has no room for them.
        """
        pinned, free = self._dist.device.type == "cuda", free_bytes()
        wanted = {(group, name): shape for group in shapes for name, shape in shapes[group].items()}
        kept = {
            key: buffer
            for key, buffer in self._buffers.items()
            if key in wanted and _alike(buffer, wanted[key])
        }
        sizes = [shape.nbytes for key, shape in wanted.items() if key not in kept]
        # PyTorch takes pinned memory in powers of two
        needed = sum(1 << (size - 1).bit_length() if pinned and size else size for size in sizes)
        fits = needed <= (1 - SPARED) * free
        if fits:
            self._buffers = {
                key: kept[key] if key in kept else _buffer(shape, pinned)
                for key, shape in wanted.items()
            }
        elif not self._said_that_it_waits:
            self._say(
                f"checkpoints are written while training waits: a copy takes {needed:,} bytes of"
                f" memory, and {free:,} are free"
            )
            self._said_that_it_waits = True
        return fits

    def _run(
        self,
        step: int,
        shapes: Mapping[str, Mapping[str, Tensor]],
        meta: str,
        best: bool,
        tensors: Iterator[Tensor],
        tolerated: type[Exception],
    ) -> None:
        """Writes a checkpoint. Reports a `tolerated` error, and training goes on."""
        folder, problem = self._directory / f".step_{step}.writing", ""
        try:
            _write(folder, shapes, meta, tensors)
            _publish(folder, self._directory / f"step_{step}", best)
        except tolerated as error:
            problem = brief(error)
        with contextlib.suppress(Exception):  # no checkpoint depends on it
            if problem:
                self._clean_up(folder, step, problem)
            else:
                folders.retire(self._directory, step, self._keep, self._say)
                self._on_saved(self._directory / f"step_{step}")
        self.failures = self.failures + 1 if problem else 0
        self._outcome = problem

    def _clean_up(self, folder: Path, step: int, problem: str) -> None:
        folders.put_back(self._directory)
        shutil.rmtree(folder, ignore_errors=True)
        last = folders.read_pointer(self._directory / "latest")
        kept = f"the last whole one is {last}" if last else "there is no whole one yet"
        self._say(f"checkpoint of step {step} FAILED ({problem}); training goes on, {kept}")


def _alike(buffer: Tensor, shape: Tensor) -> bool:
    return (buffer.shape, buffer.dtype) == (shape.shape, shape.dtype)


def _buffer(shape: Tensor, pinned: bool = False) -> Tensor:
    return torch.empty(shape.shape, dtype=shape.dtype, device="cpu", pin_memory=pinned)


def _write(
    folder: Path,
    shapes: Mapping[str, Mapping[str, Tensor]],
    meta: str,
    tensors: Iterator[Tensor],
) -> None:
    """Writes a folder to the disk: each group in a file, then meta.json and the manifest."""
    folders.remove(folder)  # an earlier save of this step may have failed on a disk like this
    # not its parents: a deleted run directory must not come back with a single checkpoint in it
    folder.mkdir()
    files = {}
    for group, of_group in shapes.items():
        file = f"{group}{SUFFIX}"
        files[file] = write(folder / file, of_group, tensors)
    files[META] = write_text(folder / META, meta)
    write_manifest(folder, files)
    _sync(folder)


def _publish(folder: Path, final: Path, best: bool) -> None:
    """Renames the folder and points to it. A crash at any point leaves a complete checkpoint."""
    directory, replaced = final.parent, folders.replaced(final)
    pointers = ["latest", "best"] if best else ["latest"]
    for name in pointers:  # before any renaming, because a full disk refuses even these few bytes
        write_text(directory / f".{name}.writing", f"{final.name}\n")
    if final.is_dir():
        # a folder cannot be renamed over a full one; `put_back` undoes this after a crash
        folders.remove(replaced)
        final.rename(replaced)
    folder.rename(final)
    _sync(directory)
    for name in pointers:
        os.replace(directory / f".{name}.writing", directory / name)
    _sync(directory)
    with contextlib.suppress(OSError):  # the next save of this step, or the next start, tries again
        folders.remove(replaced)


def _sync(folder: Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network disks cannot do that
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
