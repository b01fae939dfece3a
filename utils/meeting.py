"""How ranks find each other, and what they compare before they form a group: code, PyTorch, devices."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as c10d

from utils import git
from utils.errors import ConfigError
from utils.hub import Hub
from utils.launchers import Launch, rendezvous
from utils.watch import Watch

Told = dict[str, str]


@dataclass(frozen=True)
class Meeting:
    """The key-value store that all ranks share, and where it is: rank 0 hosts it."""

    store: c10d.Store
    host: str
    port: int

    def client(self, prefix: str, timeout_s: float) -> c10d.Store:
        """A connection of its own, for a thread of its own: a call that blocks holds up all others on the same one."""
        store = c10d.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        return c10d.PrefixStore(prefix, store)


def meet(launch: Launch, timeout_s: float) -> Meeting:
    """Wait for all ranks."""
    host, port = rendezvous(os.environ, launch, os.getppid())
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)  # where PyTorch looks for them
    timeout = timedelta(seconds=timeout_s)
    with _meeting(launch):
        store, _, _ = next(c10d.rendezvous("env://", rank=launch.rank, world_size=launch.world_size, timeout=timeout))
        # torchrun keeps its store over a restart; an attempt must not meet the addresses that the last one left there.
        store = c10d.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return Meeting(store, host, port)
        # torchrun hosts this store. It may die before the run does, which then still has a checkpoint to write.
        if launch.rank == 0:
            host = _own_address(host)
            own = c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            store.set("store", f"{host} {own.port}")
        else:
            host, text = store.get("store").decode().split()
            own = c10d.TCPStore(host, int(text), is_master=False, wait_for_workers=False, timeout=timeout)
        return Meeting(c10d.PrefixStore("run", own), host, own.port)


def watch(meeting: Meeting, launch: Launch, timeout_s: float) -> Watch:
    """This rank's watch, connected to the others'."""
    with _meeting(launch):
        hub = Hub(meeting.host, launch.world_size, timeout_s) if launch.rank == 0 else None
        if hub is not None:
            meeting.store.set("hub", f"{meeting.host} {hub.port} {hub.key}")
        return Watch.join(meeting.store.get("hub").decode(), launch, timeout_s, hub)


def exchange(store: c10d.Store, launch: Launch, own: Told) -> list[Told]:
    """What every rank tells, through the store; ConfigError on all ranks where one runs other code or another PyTorch.

    No rank leaves before all have read, for one of them hosts the store.
    """
    files = json.dumps(git.code_hashes())
    own = {**own, "host": socket.gethostname(), "torch": torch.__version__}
    with _meeting(launch):
        store.set(f"code/{launch.rank}", files)
        store.set(f"told/{launch.rank}", json.dumps(own))
        told = [json.loads(store.get(f"told/{rank}")) for rank in range(launch.world_size)]
        problem = _other_torch(told) or _other_code(store, told)
        if store.add("read", 1) == launch.world_size:
            store.set("all_read", "yes")
        if launch.rank == 0:
            store.wait(["all_read"])
    if problem:
        raise ConfigError(problem)
    return told


def one_line(error: Exception) -> str:
    """What an error says, and of which type it is if it was not made to be read."""
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def _other_torch(told: Sequence[Told]) -> str:
    for rank, text in enumerate(told):
        if text["torch"] != told[0]["torch"]:
            return f"{_rank(rank, text)} runs PyTorch {text['torch']} and rank 0 {told[0]['torch']}; use one environment on all hosts"
    return ""


def _other_code(store: c10d.Store, told: Sequence[Told]) -> str:
    first = store.get("code/0")
    for rank, text in enumerate(told):
        if (other := store.get(f"code/{rank}")) == first:
            continue
        there, here = json.loads(other), json.loads(first)
        file = min(name for name in {*there, *here} if there.get(name) != here.get(name))
        how = "differs" if file in there and file in here else "is there and not here" if file in there else "is missing there"
        return f"{_rank(rank, text)} runs other code than rank 0: {file} {how}; use one checkout on all hosts"
    return ""


def _rank(rank: int, told: Told) -> str:
    return f"rank {rank} (host {told['host']})"


def _own_address(master: str) -> str:
    """Where the others reach this host: as they reach the master, if that is here; else by the address that faces it."""
    places = socket.getaddrinfo(master, 0, type=socket.SOCK_STREAM)
    for family, kind, _, _, place in places:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(place)
                return master
            except OSError:
                continue
    with socket.socket(places[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect((places[0][4][0], 9))
        return probe.getsockname()[0]


@contextmanager
def _meeting(launch: Launch) -> Iterator[None]:
    try:
        yield
    except (c10d.DistError, OSError) as error:
        where = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
        raise ConfigError(
            f"{where}: rank {launch.rank} of {launch.world_size} could not meet the others ({one_line(error)[:160]}); "
            "check that all ranks run and see the same address, or export another MASTER_PORT"
        ) from None
