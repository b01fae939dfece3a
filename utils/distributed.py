"""One `Dist` value per process: who am I, where do I compute, and the few collectives everything uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as c10d

from utils.errors import ConfigError, PeerError
from utils.launchers import Launch, detect, rendezvous

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Dist:
    """This process among its peers. With one process every collective is free."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "none"
    device: torch.device = CPU
    timeout_s: float = 600.0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def owned_shards(self, shards: int, rank: int | None = None) -> range:
        """The contiguous block of shards a rank owns; blocks differ by one at most."""
        rank = self.rank if rank is None else rank
        size, extra = divmod(shards, self.world_size)
        start = rank * size + min(rank, extra)
        return range(start, start + size + (rank < extra))

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> c10d.Work | None:
        """Sum in place over all ranks."""
        return c10d.all_reduce(tensor, async_op=async_op) if self.world_size > 1 else None

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks in rank order; all must have one shape."""
        if self.world_size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        c10d.all_gather(parts, tensor.contiguous())
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite with rank 0's tensor."""
        if self.world_size > 1:
            c10d.broadcast(tensor, src=0)

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text on every rank."""
        return self.all_gather_text(text if self.is_main else "")[0]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text; bytes in tensors, because nothing here unpickles a message."""
        if self.world_size == 1:
            return [text]
        payload = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)[: len(text.encode())]
        sizes = torch.cat(self.all_gather(torch.tensor([payload.numel()], device=self.device))).tolist()
        padded = torch.zeros(max(1, max(sizes)), dtype=torch.uint8, device=self.device)
        padded[: payload.numel()] = payload.to(self.device)
        parts = self.all_gather(padded)
        return [bytes(part[:size].cpu().numpy()).decode() for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        if self.world_size > 1:
            self.all_reduce(torch.zeros(1, device=self.device))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Work that may fail on some ranks only: a ConfigError on one becomes an error on all."""
        problem = ""
        try:
            yield
        except ConfigError as error:
            problem = str(error)
        problems = self.all_gather_text(problem)
        first = next((rank for rank, text in enumerate(problems) if text), None)
        if first is not None:
            if first == self.rank:
                raise ConfigError(problems[first])
            raise PeerError(f"rank {first}: {problems[first]}")


def pick_device(requested: str, launch: Launch) -> torch.device:
    """The device of this process, by its local rank."""
    kind = requested if requested != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind.split(":")[0] != "cuda":
        raise ConfigError(f"device={requested}: choose auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={requested}: PyTorch {torch.__version__} sees no CUDA device here; use device=cpu or auto")
    index = int(kind.split(":")[1]) if ":" in kind else launch.local_rank % torch.cuda.device_count()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device={requested}: this host has {torch.cuda.device_count()} CUDA devices; use device=cuda")
    return torch.device("cuda", index)


def start(device: str = "auto", backend: str = "auto", timeout_s: float = 600.0) -> Dist:
    """Join the process group, once per process: a multirun keeps it from job to job."""
    launch = detect(os.environ)
    where = pick_device(device, launch)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist = Dist(launch.rank, launch.world_size, launch.local_rank, launch.launcher, where, timeout_s)
    if launch.launcher == "none" or c10d.is_initialized():
        return dist
    chosen = backend if backend != "auto" else ("nccl" if where.type == "cuda" else "gloo")
    if chosen not in c10d.Backend.backend_list or not _available(chosen):
        raise ConfigError(f"backend={backend}: not available in this PyTorch; choose gloo (CPU, CUDA) or nccl (CUDA)")
    if chosen == "nccl" and where.type != "cuda":
        raise ConfigError(f"backend=nccl needs device=cuda, but device is {where.type}; use backend=gloo")
    address, port = rendezvous(os.environ, launch, os.getppid())
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))
    c10d.init_process_group(
        chosen, rank=launch.rank, world_size=launch.world_size, timeout=timedelta(seconds=timeout_s),
        device_id=where if chosen == "nccl" else None,
    )  # fmt: skip
    return dist


def stop() -> None:
    """Leave the process group; safe to call on every exit and more than once."""
    if c10d.is_initialized():
        c10d.destroy_process_group()


def _available(backend: str) -> bool:
    return {"gloo": c10d.is_gloo_available, "nccl": c10d.is_nccl_available, "mpi": c10d.is_mpi_available}.get(backend, lambda: True)()
