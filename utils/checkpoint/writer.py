"""Checkpoints written in the background: training stops for a copy in memory, never for the disk."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from safetensors.torch import save_file  # here, because the loader may fork its workers while our thread would be importing
from torch import Tensor

from utils.checkpoint.manifest import MANIFEST, entry_of, text_of
from utils.checkpoint.stepfolders import Retention, pointed, remove, replaced
from utils.errors import brief
from utils.ranks.distributed import Dist

POLL_S = 0.02
VISIBLE_S = 20.0  # how long a network disk may take to show one host what another wrote
Files = dict[str, dict[str, int | str]]


@dataclass(frozen=True)
class _Job:
    """One save, with all that its thread needs."""

    step: int
    serial: int
    aside: Path
    files: dict[str, dict[str, Tensor]]
    meta: str
    best: bool


class Saver:
    """Made by all ranks at the same point; all call `save` at the same steps. Rank 0 uses `say`, also from its thread."""

    def __init__(self, directory: Path, dist: Dist, say: Callable[[str], None], keep: int | None = 2) -> None:
        assert keep is None or keep >= 1, keep
        self.failures = 0  # in a row
        self.best_failed = False  # whether the last save of a best did not come to be
        self._directory, self._dist, self._say = directory, dist, say
        self._retention = Retention(directory, keep, say)
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcome, self._serial, self._stall_s = "", 0, 0.0
        self._patience_s = math.inf  # a slow disk is no failure; a run whose ranks have died is ended by the watch
        with dist.agreed():
            if dist.is_main:
                self._retention.tidy()
        # Ranks come here after the tidying, and a rank that an earlier crash left behind does not know this name.
        self._token = dist.broadcast_text(uuid.uuid4().hex[:8])

    def save(
        self,
        step: int,
        groups: Mapping[str, Mapping[str, Tensor]],
        shards: Mapping[int, Mapping[str, Tensor]],
        meta: Mapping[str, Any],
        best: bool = False,
    ) -> None:
        """Copy the tensors and return; they are written behind the caller's back, after the save before this one.

        Of `groups`, `meta` and `best` only rank 0's count, of `shards` each rank's own.
        """
        self._join()
        started = time.perf_counter()
        self._serial += 1
        wanted = dict(groups) if self._dist.is_main else {}
        assert all(name and name != "shards" and "." not in name and "/" not in name for name in wanted), list(wanted)
        if shards:
            first, last = min(shards), max(shards)
            assert sorted(shards) == list(range(first, last + 1)), "a rank's shards stand side by side"
            wanted[f"shards.{first}-{last}"] = {f"{shard}/{name}": t for shard in shards for name, t in shards[shard].items()}
        text = json.dumps({**meta, "step": step, "groups": sorted(groups)}, indent=1) + "\n" if self._dist.is_main else ""
        aside = self._directory / f".step_{step}.writing-{self._token}-{self._serial}"
        job = _Job(step, self._serial, aside, self._snapshot(wanted), text, best)
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"save-step-{step}")
        self._thread.start()
        self._stall_s += time.perf_counter() - started

    def wait(self) -> str:
        """Until no save is in progress; empty, or why the last one failed. All ranks are told the same."""
        self._join()
        return self._outcome

    def take_stall_s(self) -> float:
        """Seconds for which callers have been held up since the last reading."""
        taken, self._stall_s = self._stall_s, 0.0
        return taken

    def close(self, patience_s: float | None = None) -> None:
        """Finish what is being written, so that the process may exit; `patience_s` bounds the wait for ranks that may be dead."""
        self._patience_s = math.inf if patience_s is None else patience_s
        self._join()
        self._buffers = {}

    def _join(self) -> None:
        if self._thread is not None:
            started = time.perf_counter()
            self._thread.join()
            self._thread, self._stall_s = None, self._stall_s + time.perf_counter() - started

    def _snapshot(self, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copies in CPU memory, kept from save to save: fresh pages would cost more than the copying."""
        buffers: dict[str, Tensor] = {}
        devices: set[torch.device] = set()
        copied: dict[str, dict[str, Tensor]] = {}
        for group, tensors in groups.items():
            copied[group] = {}
            for name, tensor in tensors.items():
                source, key = tensor.detach(), f"{group}/{name}"
                buffer = self._buffers.get(key)
                if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype or buffer.is_pinned() != source.is_cuda:
                    buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                copied[group][name] = buffers[key] = buffer.copy_(source, non_blocking=source.is_cuda)
                devices |= {source.device} if source.is_cuda else set()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = buffers
        return copied

    def _run(self, job: _Job) -> None:
        """The thread of one save. Whatever goes wrong in here must not reach training."""
        files: Files = {}
        problem = ""
        try:
            files = _write(job.aside, job.files, VISIBLE_S if job.serial == 1 and not self._dist.is_main else 0.0)
        except Exception as error:
            problem = brief(error)
        try:
            problem = self._lead(job, files, problem) if self._dist.is_main else self._follow(job, files, problem)
        except Exception as error:
            problem = problem or brief(error)  # the store went with the rank that hosts it
        self.failures = self.failures + 1 if problem else 0
        if job.best:
            self.best_failed = bool(problem)
        self._outcome = problem

    def _follow(self, job: _Job, files: Files, problem: str) -> str:
        """Tell rank 0 what this rank wrote, and hear what became of the whole."""
        self._store.set(self._key(job.serial, self._dist.rank), json.dumps({"files": files, "problem": problem}))
        if not self._await(self._key(job.serial)):
            return f"rank 0: nothing heard from it for {self._patience_s:g} s"  # it may be writing yet: the folder stays
        outcome = self._store.get(self._key(job.serial)).decode()
        if outcome:
            shutil.rmtree(job.aside, ignore_errors=True)  # rank 0 cannot see it where the disk turns out not to be shared
        return outcome

    def _lead(self, job: _Job, files: Files, problem: str) -> str:
        """Gather all ranks' pieces, publish the checkpoint, and tell every rank how it went."""
        told = {0: (files, problem), **{rank: self._hear(job, rank) for rank in range(1, self._dist.world_size)}}
        failed = next((rank for rank, (_, trouble) in told.items() if trouble), None)
        outcome = "" if failed is None else f"rank {failed}: {told[failed][1]}"
        if not outcome:
            try:
                everything = {name: entry for written, _ in told.values() for name, entry in written.items()}
                _finish(job, everything)
                _publish(job, self._directory, self._retention)
            except Exception as error:
                outcome = f"rank 0: {brief(error)}"
        if not outcome:
            self._retention.retire(job.step)
        else:
            shutil.rmtree(job.aside, ignore_errors=True)
            last = pointed(self._directory / "latest")
            kept = f"the last whole one is {last}" if last else "there is no whole one yet"
            with contextlib.suppress(Exception):  # the log may lie on the same full disk
                self._say(f"checkpoint of step {job.step} FAILED on {outcome}; training goes on, {kept}")
        if self._dist.world_size > 1:
            self._store.set(self._key(job.serial), outcome)
            if failed is None:
                self._store.delete_key(self._key(job.serial - 1))  # whoever takes part in this save has read how the last one went
        return outcome

    def _hear(self, job: _Job, rank: int) -> tuple[Files, str]:
        key = self._key(job.serial, rank)
        if not self._await(key):
            return {}, f"nothing heard from it for {self._patience_s:g} s"
        told = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return told["files"], told["problem"]

    def _await(self, key: str) -> bool:
        """Poll, because a blocking get would keep the store from everyone else in this process."""
        started = time.monotonic()
        while not self._store.check([key]):
            if time.monotonic() - started > self._patience_s:
                return False
            time.sleep(POLL_S)
        return True

    @property
    def _store(self) -> c10d.Store:
        assert self._dist.store is not None, "ranks need a store: their threads must not enter collectives"
        return self._dist.store

    def _key(self, serial: int, rank: int | None = None) -> str:
        return f"save/{self._token}/{serial}/{'outcome' if rank is None else rank}"


def _write(aside: Path, files: Mapping[str, Mapping[str, Tensor]], patience_s: float) -> Files:
    if files:
        _make(aside, patience_s)
    for name, tensors in files.items():
        save_file(dict(tensors), aside / f"{name}.safetensors", metadata={"format": "pt"})
        _sync(aside / f"{name}.safetensors")
    return {f"{name}.safetensors": entry_of(aside / f"{name}.safetensors") for name in files}


def _make(aside: Path, patience_s: float = 0.0) -> None:
    """The folder alone: a run directory that somebody has deleted or moved away must not come back with a single checkpoint in it."""
    started = time.monotonic()
    while True:
        try:
            return aside.mkdir(exist_ok=True)
        except FileNotFoundError:
            if time.monotonic() - started >= patience_s:
                raise OSError(f"{aside.parent} is not there: deleted, moved away, or on a disk that not all hosts share") from None
            time.sleep(POLL_S)


def _finish(job: _Job, files: Files) -> None:
    """Complete the folder by what describes it, once the pieces of all ranks are in it."""
    started = time.monotonic()
    for name, entry in files.items():
        while not (job.aside / name).is_file() or (job.aside / name).stat().st_size != entry["bytes"]:
            if time.monotonic() - started > VISIBLE_S:
                raise OSError(f"{name} of another rank is not to be seen here; put checkpoint_path on a disk that all hosts share")
            time.sleep(POLL_S)
    _make(job.aside)
    _write_text(job.aside / "meta.json", job.meta)
    _write_text(job.aside / MANIFEST, text_of({**files, "meta.json": entry_of(job.aside / "meta.json")}))
    _sync(job.aside)


def _publish(job: _Job, directory: Path, retention: Retention) -> None:
    """Give the folder its name and point to it; a crash between any two lines leaves a whole checkpoint."""
    final = directory / f"step_{job.step}"
    pointers = ["latest", "best"] if job.best else ["latest"]
    for name in pointers:  # before any renaming, because a full disk refuses even these few bytes
        _write_text(directory / f".{name}.writing", f"{final.name}\n")
    if final.is_dir() or final.is_symlink():
        remove(replaced(final))
        final.rename(replaced(final))  # a folder cannot be renamed over a full one; until the next line readers look here
    retention.make_way(final)
    job.aside.rename(final)
    _sync(directory)
    for name in pointers:
        if (directory / name).is_dir() and not (directory / name).is_symlink():
            retention.make_way(directory / name)
        os.replace(directory / f".{name}.writing", directory / name)
    _sync(directory)
    with contextlib.suppress(OSError):  # the next save of this step, or the next start, tries again
        remove(replaced(final))


def _write_text(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():  # some network disks cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
