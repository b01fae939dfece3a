"""One `Dist` value per process: who am I, where do I compute, and the few collectives everything uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as c10d

from utils.errors import ConfigError, LocalError, PeerError
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
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        c10d.all_gather(parts, tensor)
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
        content = text.encode(errors="surrogateescape")  # a path may hold bytes that are no UTF-8
        sizes = torch.cat(self.all_gather(torch.tensor([len(content)], device=self.device))).tolist()
        padded = torch.zeros(max(1, max(sizes)), dtype=torch.uint8)
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = self.all_gather(padded.to(self.device))
        return [bytes(part[:size].cpu().numpy()).decode(errors="surrogateescape") for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        """Wait until every rank is here; the host waits too, not only its CUDA stream."""
        if self.world_size > 1:
            arrived = torch.ones(1, device=self.device)
            self.all_reduce(arrived)
            arrived.item()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Work that may fail on some ranks only: an error on one becomes an error on all. May be nested; no other collectives inside.

        The first rank that failed raises its own error, the others a PeerError that carries its text.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        # A PeerError came out of an agreement further in: the rank it tells of speaks, not this one.
        problems = self.all_gather_text("" if own is None or isinstance(own, PeerError) else _one_line(own))
        first = next((rank for rank, text in enumerate(problems) if text), None)
        if own is not None and first == self.rank:
            raise _loud(own)
        if first is not None:
            raise PeerError(f"rank {first}: {problems[first]}") from own
        if own is not None:
            raise own

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 does the work first (and fills a cache), the others after it; an error on one is an error on all."""
        if not self.is_main:
            with self.agreed():
                pass  # rank 0 is at work
        with self.agreed():
            yield
        if self.is_main:
            with self.agreed():
                pass  # the others are at work


def pick_device(requested: str, launch: Launch) -> torch.device:
    """The device of this process, by its local rank."""
    kind = requested if requested != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    name, _, number = kind.partition(":")
    if name != "cuda" or (number and not number.isdecimal()) or kind.endswith(":"):
        raise ConfigError(f"device={requested}: choose auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={requested}: PyTorch {torch.__version__} sees no CUDA device here; use device=cpu or auto")
    if number and launch.world_size > 1:
        raise ConfigError(f"device={requested} puts all {launch.world_size} ranks on one device; use device=cuda")
    index = int(number) if number else launch.local_rank % torch.cuda.device_count()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device={requested}: this host has {torch.cuda.device_count()} CUDA devices; use device=cuda")
    return torch.device("cuda", index)


def pick_backend(requested: str, device: torch.device) -> str:
    """The collectives' backend for a device."""
    chosen = requested if requested != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    known = {"gloo": c10d.is_gloo_available, "nccl": c10d.is_nccl_available}
    if chosen not in known or not known[chosen]():
        raise ConfigError(f"backend={requested}: not available in this PyTorch; choose gloo (CPU, CUDA) or nccl (CUDA)")
    if chosen == "nccl" and device.type != "cuda":
        raise ConfigError(f"backend=nccl needs device=cuda, but device is {device.type}; use backend=gloo")
    return chosen


def start(device: str = "auto", backend: str = "auto", timeout_s: float = 600.0) -> Dist:
    """Join the process group, once per process: a multirun keeps it from job to job."""
    launch = detect(os.environ)
    if launch.launcher == "none":
        return _placed(launch, device, backend, timeout_s)[0]
    if c10d.is_initialized():
        dist, chosen = _placed(launch, device, backend, timeout_s)
        if chosen != c10d.get_backend():
            raise ConfigError(f"backend={chosen}: this process already runs {c10d.get_backend()}; sweep over backends in separate runs")
        return dist
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s={timeout_s:g} is not a time to wait; use e.g. timeout_s=600")
    store = _meet(launch, timeout_s)
    found: tuple[Dist, str] | None = None
    problem: ConfigError | None = None
    try:
        found = _placed(launch, device, backend, timeout_s)
    except ConfigError as error:
        problem = error
    # Compared before the group exists: a rank without its device, or with another backend, would leave the rest waiting.
    told = _exchange(store, launch, f"error {_one_line(problem)}" if problem else f"backend {found[1] if found else ''}")
    for rank, text in enumerate(told):
        if text.startswith("error "):
            raise _loud(problem) if problem and rank == launch.rank else PeerError(f"rank {rank}: {text.removeprefix('error ')}")
        if text != told[0]:
            raise ConfigError(
                f"backend=auto: rank 0 chose {told[0].split()[1]}, rank {rank} {text.split()[1]}; set device=cpu or device=cuda"
            )
    assert found is not None
    dist, chosen = found
    c10d.init_process_group(
        chosen, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timedelta(seconds=timeout_s),
        device_id=dist.device if chosen == "nccl" else None,
    )  # fmt: skip
    return dist


def stop() -> None:
    """Leave the process group; safe to call on every exit and more than once."""
    if c10d.is_initialized():
        c10d.destroy_process_group()


def _placed(launch: Launch, device: str, backend: str, timeout_s: float) -> tuple[Dist, str]:
    where = pick_device(device, launch)
    chosen = pick_backend(backend, where)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    return Dist(launch.rank, launch.world_size, launch.local_rank, launch.launcher, where, timeout_s), chosen


def _meet(launch: Launch, timeout_s: float) -> c10d.Store:
    """The key-value store that all ranks share, hosted by rank 0 (or by torchrun)."""
    address, port = rendezvous(os.environ, launch, os.getppid())
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)  # where PyTorch looks for them
    with _meeting(launch):
        store, _, _ = next(c10d.rendezvous("env://", rank=launch.rank, world_size=launch.world_size, timeout=timedelta(seconds=timeout_s)))
    # torchrun keeps its store over a restart; an attempt must not meet the addresses that the last one left there.
    return c10d.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _exchange(store: c10d.Store, launch: Launch, text: str) -> list[str]:
    """Every rank's text through the store; no rank leaves before all have read, for one of them hosts it."""
    with _meeting(launch):
        store.set(f"told/{launch.rank}", text)
        told = [store.get(f"told/{rank}").decode() for rank in range(launch.world_size)]
        if store.add("read", 1) == launch.world_size:
            store.set("all_read", "yes")
        if launch.rank == 0:
            store.wait(["all_read"])
    return told


@contextmanager
def _meeting(launch: Launch) -> Iterator[None]:
    try:
        yield
    except c10d.DistError as error:
        where = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
        raise ConfigError(
            f"{where}: rank {launch.rank} of {launch.world_size} could not meet the others ({_one_line(error)[:160]}); "
            "check that all ranks run and see the same address, or export another MASTER_PORT"
        ) from None


def _loud(error: Exception) -> Exception:
    """All ranks have agreed that this one speaks: its error must not be taken for one that rank 0 tells too."""
    return LocalError(str(error)) if isinstance(error, ConfigError) else error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
