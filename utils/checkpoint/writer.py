"""Writes checkpoints in the background: training waits for a copy in memory, never for the disk.
Each rank copies and writes its own part.
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

from utils.checkpoint.manifest import MANIFEST, entry_of, text_of
from utils.checkpoint.slices import Slice, deal
from utils.checkpoint.stepfolders import Retention, aside_of, read_pointer, remove
from utils.checkpoint.tensorfiles import write
from utils.errors import ConfigError, brief
from utils.ranks.distributed import Dist

POLL_S = 0.02
FILE_BYTES = 2 << 30  # the most in a file, approximately, because no row is cut
DISK_LAG_S = 20.0  # how long a network disk may take to show one host what another wrote
Files = dict[str, dict[str, int | str]]


@dataclass(frozen=True)
class _Save:
    """One save, with all that its thread needs."""

    step: int
    serial: int
    aside: Path
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
        assert keep is None or keep >= 1, keep
        self.failures = 0  # in a row
        self.best_failed = False  # whether the last save with `best` failed
        self._directory, self._dist, self._say = directory, dist, say
        self._published = published
        self._retention = Retention(directory, keep, say)
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcome, self._serial, self._stall_s = "", 0, 0.0
        # a slow disk is no failure; a run whose ranks have died is ended by the watch
        self._patience_s = math.inf
        with dist.agreed():
            if dist.is_main:
                self._retention.tidy()
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
        shards: Mapping[int, Mapping[str, Tensor]],
        meta: Mapping[str, Any],
        best: bool = False,
    ) -> None:
        """Copies this rank's part of the tensors and returns; a thread writes it after the previous
        save.

        Tensors in `groups` are the same on every rank, and each rank writes a part of them. Slices,
        and all of `shards`, are this rank's own. `meta` and `best` count on rank 0.
        """
        self._join()
        started = time.perf_counter()
        self._serial += 1
        assert all(
            name and name != "shards" and "." not in name and "/" not in name for name in groups
        ), list(groups)
        wanted = self._files_of(groups)
        if shards:
            first, last = min(shards), max(shards)
            assert sorted(shards) == list(range(first, last + 1)), "a rank's shards are consecutive"
            wanted[f"shards.{first}-{last}"] = {
                f"{shard}/{name}": Slice.whole(t)
                for shard in shards
                for name, t in shards[shard].items()
            }
        full_meta = {**meta, "step": step, "groups": sorted(groups), "ranks": self._dist.world_size}
        text = json.dumps(full_meta, indent=1) + "\n" if self._dist.is_main else ""
        aside = self._directory / f".step_{step}.writing-{self._token}-{self._serial}"
        save = _Save(step, self._serial, aside, self._snapshot(wanted), text, best)
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
        """Returns the slices that this rank writes, by file."""
        rank, ranks = self._dist.rank, self._dist.world_size
        shared = {
            f"{group}/{name}": Slice.whole(tensor)
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
            if not isinstance(tensor, Slice)
        }
        share = deal(shared, ranks)[rank]
        files: dict[str, dict[str, Slice]] = {}
        for group, tensors in groups.items():
            own = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Slice)}
            own |= {
                name: share[f"{group}/{name}"] for name in tensors if f"{group}/{name}" in share
            }
            size = sum(piece.tensor.nbytes for piece in own.values())
            pieces = deal(own, max(1, -(-size // FILE_BYTES)))
            if len(pieces) > 1:
                files |= {f"{group}.{rank}-{number}": p for number, p in enumerate(pieces) if p}
            elif own or (rank == 0 and not tensors):  # a group without tensors is a file, too
                files[group if ranks == 1 else f"{group}.{rank}"] = own
        return files

    def _snapshot(self, files: Mapping[str, Mapping[str, Slice]]) -> dict[str, dict[str, Slice]]:
        """Copies into CPU memory that is reused from save to save, because fresh pages cost more
        than the copy.
        """
        buffers: dict[str, Tensor] = {}
        devices: set[torch.device] = set()
        copied: dict[str, dict[str, Slice]] = {}
        for file, slices in files.items():
            copied[file] = {}
            for name, (tensor, first, of) in slices.items():
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
                copied[file][name] = Slice(buffer, first, of)
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
            files = _write(save.aside, save.files)
        except Exception as error:
            problem = brief(error)
        try:
            problem = (
                self._lead(save, files, problem)
                if self._dist.is_main
                else self._follow(save, files, problem)
            )
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
            # rank 0 may still be writing, so the folder stays
            return f"rank 0: nothing heard from it for {self._patience_s:g} s"
        if outcome:
            # rank 0 cannot remove it if the disk is not shared
            shutil.rmtree(save.aside, ignore_errors=True)
        return outcome

    def _lead(self, save: _Save, files: Files, problem: str) -> str:
        """Gathers all ranks' pieces, publishes the checkpoint, and tells every rank how it went."""
        failed = {0: problem} if problem else {}
        for rank in range(1, self._dist.world_size):
            text = self._receive(self._key(save.serial, rank))
            theirs, trouble = (
                json.loads(text)
                if text
                else ({}, f"nothing heard from it for {self._patience_s:g} s")
            )
            files |= theirs
            failed |= {rank: trouble} if trouble else {}
            self._store.delete_key(self._key(save.serial, rank))
        outcome = next((f"rank {rank}: {why}" for rank, why in failed.items()), "")
        if not outcome:
            try:
                _finish(save, files)
                _publish(save, self._directory, self._retention)
            except Exception as error:
                outcome = f"rank 0: {brief(error)}"
        if not outcome:
            self._retention.retire(save.step)
            with contextlib.suppress(Exception):  # no checkpoint depends on it
                self._published(self._directory / f"step_{save.step}")
        else:
            shutil.rmtree(save.aside, ignore_errors=True)
            last = read_pointer(self._directory / "latest")
            kept = f"the last whole one is {last}" if last else "there is no whole one yet"
            with contextlib.suppress(Exception):  # the log may lie on the same full disk
                self._say(
                    f"checkpoint of step {save.step} FAILED on {outcome}; training goes on, {kept}"
                )
        if self._dist.world_size > 1:
            self._store.set(self._key(save.serial), outcome)
            if not failed:
                # every rank in this save has read how the last one ended
                self._store.delete_key(self._key(save.serial - 1))
        return outcome

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


def _write(aside: Path, files: Mapping[str, Mapping[str, Slice]]) -> Files:
    if files:
        _make(aside)
    return {
        f"{name}.safetensors": write(aside / f"{name}.safetensors", slices)
        for name, slices in files.items()
    }


def _make(aside: Path) -> None:
    """Makes the folder, but not the one around it: a deleted run directory must not come back with
    a single checkpoint in it.
    """
    if not aside.parent.is_dir():
        raise OSError(f"{aside.parent} is not there: deleted, or moved away")
    aside.mkdir(exist_ok=True)


def _finish(save: _Save, files: Files) -> None:
    """Adds meta.json and the manifest, once the files of all ranks have arrived."""

    def unseen() -> list[str]:
        there = {name: save.aside / name for name in files}
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
    _make(save.aside)
    _write_text(save.aside / "meta.json", save.meta)
    _write_text(
        save.aside / MANIFEST, text_of({**files, "meta.json": entry_of(save.aside / "meta.json")})
    )
    _sync(save.aside)


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


def _publish(save: _Save, directory: Path, retention: Retention) -> None:
    """Renames the folder and points to it. A crash at any point leaves a complete checkpoint."""
    final = directory / f"step_{save.step}"
    pointers = ["latest", "best"] if save.best else ["latest"]
    for name in pointers:  # before any renaming, because a full disk refuses even these few bytes
        _write_text(directory / f".{name}.writing", f"{final.name}\n")
    if final.is_dir() or final.is_symlink():
        remove(aside_of(final))
        # a folder cannot be renamed over a full one; until it is replaced, readers look aside
        final.rename(aside_of(final))
    retention.make_way(final)
    save.aside.rename(final)
    _sync(directory)
    for name in pointers:
        if (directory / name).is_dir() and not (directory / name).is_symlink():
            retention.make_way(directory / name)
        os.replace(directory / f".{name}.writing", directory / name)
    _sync(directory)
    with contextlib.suppress(OSError):  # the next save of this step, or the next start, tries again
        remove(aside_of(final))


def _write_text(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # some network disks cannot sync a folder
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
