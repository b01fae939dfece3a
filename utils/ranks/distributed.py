"""One `Dist` per process: its rank, its device, and the collectives that all code uses."""

from __future__ import annotations

import atexit
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as c10d

from utils.errors import ConfigError, PeerError, type_and_text
from utils.ranks.launchers import Launch, detect
from utils.ranks.meeting import meet, refuse_differences
from utils.ranks.watch import Watch, this_process

# the failure watch ends waits; the backend's timeout would count time that a rank was suspended
BACKSTOP_S = 86400.0


@dataclass(frozen=True)
class Dist:
    """This process's rank and device. With one process, collectives do nothing."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "none"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 600.0
    watch: Watch | None = field(default=None, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def owned_shards(self, shards: int, rank: int | None = None) -> range:
        """Returns the contiguous block of shards that a rank owns; sizes differ by at most one."""
        rank = self.rank if rank is None else rank
        size, extra = divmod(shards, self.world_size)
        start = rank * size + min(rank, extra)
        return range(start, start + size + (rank < extra))

    def waiting(self, forever: bool = False) -> AbstractContextManager[None]:
        """A context for everything that waits for other ranks. After `timeout_s` the failure watch
        ends the run, but not while ranks wait `forever`, as for rank 0's disk.
        """
        return nullcontext() if self.watch is None else self.watch.waiting(forever)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over all ranks, in place."""
        if self.world_size > 1:
            with self.waiting():
                c10d.all_reduce(tensor)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Returns each of these numbers summed over all ranks."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.waiting():
            self.all_reduce(tensor)
            return tensor.tolist()

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Splits a tensor along its first dimension into one chunk per rank, and sends chunk r to
        rank r. Returns the received chunks in rank order.
        """
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor)
        with self.waiting():
            c10d.all_to_all_single(received, tensor)
        return received

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks in rank order. All must have the same shape."""
        if self.world_size == 1:
            return [tensor]
        tensor = tensor.contiguous()
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self.waiting():
            c10d.all_gather(tensors, tensor)
        return tensors

    def all_gather_into(self, whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Fills `whole` with the tensors of all ranks in rank order, and returns it."""
        if self.world_size == 1:
            return whole.copy_(tensor)
        # PyTorch 2.13 warns about the older name
        gather = getattr(c10d, "all_gather_single", None) or c10d.all_gather_into_tensor
        with self.waiting():
            gather(whole, tensor)
        return whole

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Returns the tensors of all ranks on rank 0, on the CPU, and None on other ranks. Their
        types and shapes may differ.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        shapes = self.all_gather_text(" ".join([dtype, *map(str, tensor.shape)]))
        if not self.is_main:
            self.to_main(self.rank, tensor)
            return None
        tensors = [tensor.cpu()]
        for rank, text in enumerate(shapes[1:], start=1):
            dtype, *shape = text.split()
            like = torch.empty([*map(int, shape)], dtype=getattr(torch, dtype), device="meta")
            tensors.append(self.to_main(rank, like))
        return tensors

    def to_main(self, source: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns rank `source`'s tensor on rank 0, on the CPU if it comes from another rank. Only
        the two need to call it; rank 0 gives a tensor of that type and shape, without content.
        """
        if source == 0 or self.rank not in (0, source):
            return tensor
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        # gloo cannot read the memory of a GPU
        device = self.device if c10d.get_backend() == "nccl" else torch.device("cpu")
        if not self.is_main:
            # sent as bytes, because backends send few types; cloned, because `contiguous` keeps the
            # strides of a single element
            contiguous = tensor.clone(memory_format=torch.contiguous_format)
            with self.waiting():
                c10d.send(contiguous.view(-1).view(torch.uint8).to(device), dst=0)
            return tensor
        content = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
        with self.waiting():
            c10d.recv(content, src=source)
        return content.cpu().view(tensor.dtype).view(tensor.shape)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites a tensor with rank 0's."""
        if self.world_size > 1:
            with self.waiting():
                c10d.broadcast(tensor, src=0)

    def broadcast_text(self, text: str) -> str:
        """Returns rank 0's text on every rank."""
        return self.all_gather_text(text if self.is_main else "")[0]

    def all_gather_text(self, text: str) -> list[str]:
        """Returns every rank's text. Sent as bytes, because nothing here unpickles a message."""
        if self.world_size == 1:
            return [text]
        content = text.encode(errors="surrogateescape")  # a path may hold bytes that are not UTF-8
        size = torch.tensor([len(content)], device=self.device)
        sizes = torch.cat(self.all_gather(size)).tolist()
        padded = torch.zeros(max(1, max(sizes)), dtype=torch.uint8)
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        buffers = self.all_gather(padded.to(self.device))
        return [
            bytes(part[:size].cpu().numpy()).decode(errors="surrogateescape")
            for part, size in zip(buffers, sizes, strict=True)
        ]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A context for work that may fail on some ranks only: an error on one becomes an error on
        all. It may be nested, but holds no other collectives.

        The first rank that failed raises its own error, and so does every rank with the same error;
        the others raise a PeerError with its text.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        problem = ""
        # a PeerError from a nested agreement is another rank's error
        if failure is not None and not isinstance(failure, PeerError):
            problem = str(failure) if isinstance(failure, ConfigError) else type_and_text(failure)
        problems = self.all_gather_text(problem)
        first = next((rank for rank, text in enumerate(problems) if text), None)
        if first is not None and problem != problems[first]:
            raise PeerError(f"rank {first}: {problems[first]}") from failure
        if failure is not None:
            raise failure

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """A context that rank 0 enters first, to fill a cache for example, and then all others; an
        error on one becomes an error on all.
        """
        if not self.is_main:
            with self.agreed():
                pass  # rank 0 is at work
        with self.agreed():
            yield
        if self.is_main:
            with self.agreed():
                pass  # the others are at work


_current: Dist | None = None


def pick_device(requested: str, launch: Launch) -> torch.device:
    """Returns this process's device: `requested`, or the one of its local rank."""
    has_cuda = torch.cuda.is_available()
    if requested == "cpu" or (requested == "auto" and not has_cuda):
        return torch.device("cpu")
    if requested == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(
                f"device=mps: PyTorch {torch.__version__} sees no Apple GPU here; use device=cpu or"
                " auto"
            )
        if launch.world_size > 1:
            raise ConfigError(
                f"device=mps: one rank can use it, not {launch.world_size}; start one process"
            )
        return torch.device("mps")
    number = requested.partition(":")[2]
    if not has_cuda:
        raise ConfigError(
            f"device={requested}: PyTorch {torch.__version__} sees no CUDA device here; use"
            " device=cpu or auto"
        )
    if number and launch.world_size > 1:
        raise ConfigError(
            f"device={requested} puts all {launch.world_size} ranks on one device; use device=cuda"
        )
    index = int(number) if number else launch.local_rank % torch.cuda.device_count()
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={requested}: this host has {torch.cuda.device_count()} CUDA devices; use"
            " device=cuda"
        )
    return torch.device("cuda", index)


def pick_backend(requested: str, device: torch.device) -> str:
    """Returns the backend of collectives: `requested`, or the one that suits the device."""
    if requested == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"backend=nccl needs device=cuda, but device is {device.type}; use backend=gloo"
        )
    suits = "nccl" if device.type == "cuda" else "gloo"
    return suits if requested == "auto" else requested


def start(device: str = "auto", backend: str = "auto", timeout_s: float = 600.0) -> Dist:
    """Joins the process group and returns this process's `Dist`.

    A process joins once: a run that this one needs is made in the same group.
    """
    global _current
    launch = detect(os.environ)
    if launch.launcher == "none" or _current is not None:
        own, _ = _place_on_device(launch, device, backend)
        return replace(_current or Dist(timeout_s=timeout_s), device=own)
    # a rank without a device goes on for the moment: others would wait for it
    own, facts = torch.device("cpu"), {"error": "", "backend": "", "card": ""}
    try:
        own, facts["backend"] = _place_on_device(launch, device, backend)
        if facts["backend"] == "nccl":
            facts["card"] = str(torch.cuda.get_device_properties(own).uuid)
    except ConfigError as error:
        facts["error"] = str(error)
    allow_open_files()
    store, for_watch, everyone = meet(launch, timeout_s, {"process": this_process(), **facts})
    # from here on all ranks fail together, also where they refuse to form a group
    watch = Watch(for_watch, launch, timeout_s, [fact["process"] for fact in everyone])
    numbers = launch.rank, launch.world_size, launch.local_rank
    _current = Dist(*numbers, launch.launcher, own, timeout_s, watch)
    atexit.register(watch.stop)  # a script that simply ends does not count as lost
    refuse_differences(store, launch, everyone)
    with _current.waiting():
        c10d.init_process_group(
            facts["backend"],
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s + BACKSTOP_S),
            device_id=own if facts["backend"] == "nccl" else None,
        )
    return _current


def current() -> Dist | None:
    """Returns the `Dist` that `start` returned, if this process has joined a group."""
    return _current


def group(dist: Dist) -> c10d.ProcessGroup:
    """Returns the group of all ranks, for parts of PyTorch that need one. A single process makes
    one.
    """
    if not c10d.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if dist.device.type == "cuda" else "gloo"
        c10d.init_process_group(backend, store=c10d.HashStore(), rank=0, world_size=1)
    assert c10d.group.WORLD is not None
    return c10d.group.WORLD


def allow_open_files() -> None:
    """Raises this process's limit of open files as far as it may: rank 0 holds four connections for
    each rank, and backends connect each rank with all others.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def stop() -> None:
    """Leaves the process group. Further calls do nothing."""
    global _current
    if _current is not None and _current.watch is not None:
        _current.watch.stop()
    _current = None
    if c10d.is_initialized():
        c10d.destroy_process_group()


def _place_on_device(launch: Launch, device: str, backend: str) -> tuple[torch.device, str]:
    """Returns this process's device and backend, as asked for."""
    picked = pick_device(device, launch)
    chosen = pick_backend(backend, picked)
    if picked.type == "cuda":
        torch.cuda.set_device(picked)
    return picked, chosen
