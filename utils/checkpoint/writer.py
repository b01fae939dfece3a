"""Writes checkpoints in the background: training waits for a copy in memory, never for the disk.
Each rank copies and writes its own share.
"""

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
from socket import gethostname
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from utils.checkpoint import folders
from utils.checkpoint.format import (
    META,
    SUFFIX,
    FileEntry,
    Slice,
    share_of,
    write,
    write_manifest,
    write_text,
)
from utils.errors import ConfigError, brief
from utils.ranks.distributed import Dist

POLL_S = 0.02
DISK_LAG_S = 20.0  # how long a network disk may take to show one host what another wrote
Files = dict[str, FileEntry]


@dataclass(frozen=True)
class _Save:
    """One save, with all that its thread needs."""

    step: int
    serial: int
    folder: Path  # in which it is written, before it gets its name
    files: dict[str, dict[str, Slice]]
    meta: str
    best: bool


class Writer:
    """Created on all ranks together; all call `save` at the same steps.

    Only rank 0 calls `say`, also from its thread.
    """

    def __init__(
        self,
        directory: Path,
        dist: Dist,
        say: Callable[[str], None],
        keep: int | None = 2,
        published: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """`published` is called on rank 0 with every complete checkpoint, in the
        writer's thread.
        """
        self.failures = 0  # in a row
        self.best_failed = False  # whether the last save with `best` failed
        self._directory, self._dist, self._say = directory, dist, say
        self._keep, self._published = keep, published
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcome, self._serial, self._stall_s = "", 0, 0.0
        # a slow disk is no failure; a run whose ranks have died is ended by the watch
        self._patience_s = math.inf
        with dist.agreed():
            if dist.is_main:
                folders.tidy(directory, say)
        # Ranks arrive here after the tidying. A rank left over from an earlier crash does not know
        # this token.
        self._token = uuid.uuid4().hex[:8]
        self._refuse_unshared()

    def _refuse_unshared(self) -> None:
        """Raises ConfigError if a rank cannot see what rank 0 writes: no checkpoint would ever be
        complete. Also makes rank 0's token that of all ranks.
        """
        dist = self._dist
        if dist.is_main and dist.world_size > 1:
            with contextlib.suppress(OSError):  # the first save reports a full disk
                self._mark.touch()
        self._token, marked = dist.broadcast_text(f"{self._token} {self._mark.exists()}").split()
        seen = marked == "False" or _until(self._mark.exists, lambda: DISK_LAG_S)
        hosts = dist.all_gather_text("" if seen else gethostname())
        if dist.is_main:
            self._mark.unlink(missing_ok=True)
        if blind := [f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host]:
            raise ConfigError(
                f"checkpoint_path={self._directory.parent}: {', '.join(blind)} cannot see what rank"
                " 0 writes there; give a folder on a disk that all hosts share"
            )

    @property
    def _mark(self) -> Path:
        return self._directory / f".latest.writing-{self._token}"

    def save(
        self,
        step: int,
        groups: Mapping[str, Mapping[str, Tensor | Slice]],
        meta: Mapping[str, Any],
        best: bool = False,
    ) -> None:
        """Copies this rank's share of the tensors and returns; a thread writes it after the
        previous save.

        Tensors are the same on every rank, and each rank writes a share of them. Slices are this
        rank's own. `meta` and `best` count on rank 0.
        """
        self._join()
        started = time.perf_counter()
        self._serial += 1
        text = json.dumps({**meta, "step": step, "ranks": self._dist.world_size}, indent=1) + "\n"
        folder = self._directory / f".step_{step}.writing-{self._token}-{self._serial}"
        copied = self._copy(self._files_of(groups))
        save = _Save(step, self._serial, folder, copied, text, best)
        self._thread = threading.Thread(target=self._run, args=(save,), name=f"save-step-{step}")
        self._thread.start()
        self._stall_s += time.perf_counter() - started

    def wait(self) -> str:
        """Waits until no save is in progress. Returns why the last one failed, or an empty string;
        the same on all ranks.
        """
        self._join()
        return self._outcome

    def take_stall_s(self) -> float:
        """Returns the seconds for which callers have waited since the last call."""
        taken, self._stall_s = self._stall_s, 0.0
        return taken

    def close(self, patience_s: float | None = None) -> None:
        """Finishes the current save; `patience_s` bounds the wait for ranks that may be dead."""
        self._patience_s = math.inf if patience_s is None else patience_s
        self._join()
        self._buffers = {}

    def _join(self) -> None:
        if self._thread is not None:
            started = time.perf_counter()
            self._thread.join()
            self._thread, self._stall_s = None, self._stall_s + time.perf_counter() - started

    def _files_of(
        self, groups: Mapping[str, Mapping[str, Tensor | Slice]]
    ) -> dict[str, dict[str, Slice]]:
        """Returns what this rank writes, by file."""
        rank, ranks = self._dist.rank, self._dist.world_size
        same_on_all = {
            f"{group}/{name}": tensor
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
            if not isinstance(tensor, Slice)
        }
        share = share_of(same_on_all, rank, ranks)
        files: dict[str, dict[str, Slice]] = {}
        for group, tensors in groups.items():
            slices = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Slice)}
            slices |= {name: share[key] for name in tensors if (key := f"{group}/{name}") in share}
            if slices or (rank == 0 and not tensors):  # a group without tensors is a file, too
                files[(group if ranks == 1 else f"{group}.{rank}") + SUFFIX] = slices
        return files

    def _copy(self, files: Mapping[str, Mapping[str, Slice]]) -> dict[str, dict[str, Slice]]:
        """Copies into CPU memory that is reused from save to save, because fresh pages cost more
        than the copy.
        """
        buffers: dict[str, Tensor] = {}
        devices: set[torch.device] = set()
        copied: dict[str, dict[str, Slice]] = {}
        for file, slices in files.items():
            copied[file] = {}
            for name, (tensor, rows) in slices.items():
                source, key = tensor.detach(), f"{file}/{name}"
                buffer = self._buffers.get(key)
                if (
                    buffer is None
                    or buffer.shape != source.shape
                    or buffer.dtype != source.dtype
                    or buffer.is_pinned() != source.is_cuda
                ):
                    buffer = torch.empty(
                        source.shape, dtype=source.dtype, pin_memory=source.is_cuda
                    )
                buffers[key] = buffer.copy_(source, non_blocking=source.is_cuda)
                copied[file][name] = Slice(buffer, rows)
                devices |= {source.device} if source.is_cuda else set()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = buffers
        return copied

    def _run(self, save: _Save) -> None:
        """Runs one save in its thread. No error in it may reach training."""
        files: Files = {}
        problem = ""
        try:
            files = _write(save)
        except Exception as error:
            problem = brief(error)
        try:
            finish = self._lead if self._dist.is_main else self._follow
            problem = finish(save, files, problem)
        except Exception as error:
            problem = problem or brief(error)  # the rank that hosts the store has gone
        self.failures = self.failures + 1 if problem else 0
        if save.best:
            self.best_failed = bool(problem)
        self._outcome = problem

    def _follow(self, save: _Save, files: Files, problem: str) -> str:
        """Reports to rank 0 what this rank wrote; returns how the save ended."""
        self._store.set(self._key(save.serial, self._dist.rank), json.dumps([files, problem]))
        outcome = self._receive(self._key(save.serial))
        if outcome is None:
            return f"rank 0: nothing heard from it for {self._patience_s:g} s"
        return outcome

    def _lead(self, save: _Save, files: Files, problem: str) -> str:
        """Hears what all ranks wrote, publishes the checkpoint, and tells all how it went."""
        failed = {0: problem} if problem else {}
        for rank in range(1, self._dist.world_size):
            text = self._receive(self._key(save.serial, rank))
            written, trouble = (
                json.loads(text)
                if text
                else ({}, f"nothing heard from it for {self._patience_s:g} s")
            )
            files |= written
            failed |= {rank: trouble} if trouble else {}
            self._store.delete_key(self._key(save.serial, rank))
        outcome = next((f"rank {rank}: {why}" for rank, why in failed.items()), "")
        if not outcome:
            try:
                _finish(save, files)
                _publish(save, self._directory)
            except Exception as error:
                outcome = f"rank 0: {brief(error)}"
        with contextlib.suppress(Exception):  # no checkpoint depends on it
            if outcome:
                self._clean_up(save, outcome)
            else:
                folders.retire(self._directory, save.step, self._keep, self._say)
                self._published(self._directory / f"step_{save.step}")
        if self._dist.world_size > 1:
            self._store.set(self._key(save.serial), outcome)
            if not failed:
                # every rank in this save has read how the last one ended
                self._store.delete_key(self._key(save.serial - 1))
        return outcome

    def _clean_up(self, save: _Save, outcome: str) -> None:
        folders.put_back(self._directory)
        shutil.rmtree(save.folder, ignore_errors=True)
        last = folders.read_pointer(self._directory / "latest")
        kept = f"the last whole one is {last}" if last else "there is no whole one yet"
        self._say(f"checkpoint of step {save.step} FAILED on {outcome}; training goes on, {kept}")

    def _receive(self, key: str) -> str | None:
        """Returns what another rank sent under this key, or None if that takes too long."""
        # Polled, because a blocking get would keep the store from everyone else in this process.
        arrived = _until(lambda: self._store.check([key]), lambda: self._patience_s)
        return self._store.get(key).decode() if arrived else None

    @property
    def _store(self) -> c10d.Store:
        assert self._dist.store is not None, (
            "ranks need a store: their threads must not enter collectives"
        )
        return self._dist.store

    def _key(self, serial: int, rank: int | None = None) -> str:
        return f"save/{self._token}/{serial}/{'outcome' if rank is None else rank}"


def _write(save: _Save) -> Files:
    """Writes this rank's files."""
    # not its parents: a deleted run directory must not come back with a single checkpoint in it
    save.folder.mkdir(exist_ok=True)
    return {name: write(save.folder / name, slices) for name, slices in save.files.items()}


def _finish(save: _Save, files: Files) -> None:
    """Adds meta.json and the manifest, once the files of all ranks have arrived."""

    def unseen() -> list[str]:
        there = {name: save.folder / name for name in files}
        return [
            name
            for name, file in there.items()
            if not file.is_file() or file.stat().st_size != files[name]["bytes"]
        ]

    if not _until(lambda: not unseen(), lambda: DISK_LAG_S):
        raise OSError(
            f"{', '.join(unseen())} of another rank is not to be seen here; put checkpoint_path on"
            " a disk that all hosts share"
        )
    meta = {META: write_text(save.folder / META, save.meta)}
    write_manifest(save.folder, files | meta)
    _sync(save.folder)


def _publish(save: _Save, directory: Path) -> None:
    """Renames the folder and points to it. A crash at any point leaves a complete checkpoint."""
    final = directory / f"step_{save.step}"
    replaced = folders.replaced(final)
    pointers = ["latest", "best"] if save.best else ["latest"]
    for name in pointers:  # before any renaming, because a full disk refuses even these few bytes
        write_text(directory / f".{name}.writing", f"{final.name}\n")
    if final.is_dir():
        # a folder cannot be renamed over a full one; `put_back` undoes this after a crash
        folders.remove(replaced)
        final.rename(replaced)
    save.folder.rename(final)
    _sync(directory)
    for name in pointers:
        os.replace(directory / f".{name}.writing", directory / name)
    _sync(directory)
    with contextlib.suppress(OSError):  # the next save of this step, or the next start, tries again
        folders.remove(replaced)


def _until(true: Callable[[], bool], patience_s: Callable[[], float]) -> bool:
    """Waits for a condition, at most `patience_s()`, which may change meanwhile. Returns whether it
    came true.
    """
    started = time.monotonic()
    while not true():
        if time.monotonic() - started > patience_s():
            return False
        time.sleep(POLL_S)
    return True


def _sync(folder: Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network disks cannot do that
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
