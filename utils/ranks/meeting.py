"""How ranks find each other: rank 0 hosts a store, and the others look for it.

Before they form a group they compare what they run: code, PyTorch, devices.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from signal import SIGTERM
from typing import Any

import torch
import torch.distributed as c10d

from utils import revision
from utils.errors import ConfigError, LocalError, PeerError
from utils.ranks import signals
from utils.ranks.launchers import Launch, master_address, on_one_host
from utils.ranks.watch import named

PATIENT_S = 5.0  # how long a rank waits before it tells the user
STORE_S = 30.0  # how long a process at the master's port may take to answer as a store
# the same for an address in torchrun's store, which may be of a failed attempt: it is tried again
TRY_S = 2.0
# for a name to become known, as those of a cluster's services do when their hosts have started
UNKNOWN_S = 15.0
POLL_S = 0.2  # many ranks must not keep the store busy
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ADDRESS = "lockstep"  # the key in torchrun's store that holds the address of rank 0's store

Facts = Mapping[str, str]  # a rank's description of itself


def meet(
    launch: Launch, timeout_s: float, own: Facts
) -> tuple[c10d.Store, c10d.Store, list[Facts]]:
    """Meets the other ranks at a store, which rank 0 hosts.

    Returns the store, another connection to it for the watch's thread (a call that blocks holds up
    all others on its connection), and what each rank says about itself: host, PyTorch, code, and
    what it gives as `own`.
    """
    try:
        host, port = master_address(os.environ, launch, os.getppid())
    except ConfigError as error:
        # a launcher's mistake is the same on all ranks; one made by hand may be on this rank alone
        raise _found_here(str(error), launch) if launch.launcher == "env" else error from None
    # where PyTorch looks for them
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            host, tcp_store = _by_agent(launch, host, port, timeout_s)
        elif launch.rank == 0:
            tcp_store = _hosted(host, port, timeout_s)
        else:
            _find(launch, host, port, timeout_s)
            tcp_store = _client(host, port, timeout_s)
        store = c10d.PrefixStore("run", tcp_store)
        facts = _exchange(store, launch, timeout_s, own)
        for_watch = c10d.PrefixStore("watch", _client(host, tcp_store.port, timeout_s))
    except (c10d.DistError, OSError) as error:
        reason = str(error).partition("Exception raised from")[0]  # without frames of C++
        line = (
            f"{_where()}: rank {launch.rank} of {launch.world_size} could not meet the others"
            f" ({' '.join(reason.split())[:160]}); check that all ranks run and see the same"
            " address, or export another MASTER_PORT"
        )
        raise _found_here(line, launch) from None
    return store, for_watch, facts


def _exchange(store: c10d.Store, launch: Launch, timeout_s: float, own: Facts) -> list[Facts]:
    """Returns what every rank says about itself, once all have come."""
    hashes = json.dumps(revision.code_hashes())
    code = hashlib.sha256(hashes.encode()).hexdigest()
    facts = {"host": socket.gethostname(), "torch": torch.__version__, "code": code, **own}
    keys = [f"facts/{rank}" for rank in range(launch.world_size)]
    store.set(f"code/{launch.rank}", hashes)
    store.set(keys[launch.rank], json.dumps(facts))

    def missing() -> str:
        ranks = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return f"{named(ranks)} of {launch.world_size}"

    for waited_s, word in _waiting(launch):
        if store.check(keys):
            return [json.loads(text) for text in store.multi_get(keys)]
        if launch.rank > 0:
            if store.check(["given up"]):
                break
        elif word:
            signals.say(f"waiting for {missing()} at {_where()}")
        elif waited_s > timeout_s:
            store.set("given up", "")
            time.sleep(2 * POLL_S)
            break
    # the same on all ranks, so rank 0 prints it
    raise ConfigError(
        f"{_where()}: {missing()} did not come within timeout_s={timeout_s:g} s; check that all"
        " ranks run and see one address"
    )


def refuse_differences(store: c10d.Store, launch: Launch, facts: Sequence[Facts]) -> None:
    """Raises, on all ranks, what keeps them from forming one group.

    `facts` have, beside what `meet` adds, the `error` of a rank that cannot have its device, its
    `backend`, and with NCCL its `card`.
    """
    problem, errors = _other_code(store, facts), [fact["error"] for fact in facts]
    if not problem and any(errors):
        rank = next(rank for rank, error in enumerate(errors) if error)
        problem = errors[rank]
        if len({*errors}) > 1:
            if errors[launch.rank]:
                raise LocalError(errors[launch.rank])
            raise PeerError(f"rank {rank}: {problem}")
    if problem := problem or _other_backend(facts):
        raise ConfigError(problem) if launch.rank == 0 else PeerError(problem)


def _other_code(store: c10d.Store, facts: Sequence[Facts]) -> str:
    """Returns what the first rank that differs from rank 0 runs; empty if none differs."""
    for rank, fact in enumerate(facts):
        who = f"rank {rank} (host {fact['host']}) runs"
        if fact["torch"] != facts[0]["torch"]:
            versions = f"PyTorch {fact['torch']} and rank 0 {facts[0]['torch']}"
            return f"{who} {versions}; use one environment on all hosts"
        if fact["code"] != facts[0]["code"]:
            there, here = (json.loads(store.get(f"code/{r}")) for r in (rank, 0))
            file = min(name for name in {*there, *here} if there.get(name) != here.get(name))
            return f"{who} other code than rank 0: {file} differs; use one checkout on all hosts"
    return ""


def _other_backend(facts: Sequence[Facts]) -> str:
    """Returns which two ranks cannot be in one group, for which NCCL's own error comes late and
    fills a page; empty if all can.
    """
    backends, cards = ([fact[name] for fact in facts] for name in ("backend", "card"))
    for rank, (backend, card) in enumerate(zip(backends, cards, strict=True)):
        if backend != backends[0]:
            chosen = f"rank 0 chose {backends[0]}, rank {rank} {backend}"
            return f"backend=auto: {chosen}; set device=cpu or device=cuda"
        if card and (first := cards.index(card)) != rank:
            return (
                f"backend=nccl: ranks {first} and {rank} are on one GPU; start a rank per GPU, or"
                " set backend=gloo"
            )
    return ""


def _by_agent(launch: Launch, host: str, port: int, timeout_s: float) -> tuple[str, c10d.TCPStore]:
    """Meets under torchrun, whose store may die while the run still writes a checkpoint. So rank 0
    hosts another store, and puts the address into torchrun's.

    That outlives a restart, and the address may be from an attempt that failed. No number tells
    attempts apart, because torchrun counts failures on each node. But the ranks of a failed attempt
    are gone before the next one, and if a rank with this number has been at a store, it was in
    another attempt.
    """
    _find(launch, host, port, timeout_s)
    agents = _client(host, port, timeout_s)
    if launch.rank == 0:
        alone = on_one_host(os.environ, launch)
        host = "127.0.0.1" if alone else _address_facing(host)
        store = _hosted(host, 0, timeout_s)
        agents.set(ADDRESS, f"{host} {store.port}")
        return host, store
    for waited_s, word in _waiting(launch):
        if agents.check([ADDRESS]):
            host, number = agents.get(ADDRESS).decode().split()
            with suppress(OSError, c10d.DistError):
                socket.create_connection((host, int(number)), timeout=PATIENT_S).close()
                store = _client(host, int(number), timeout_s, TRY_S)
                if store.add(f"came/{launch.rank}", 1) == 1:
                    return host, store
        if waited_s > timeout_s:
            break
        if word and launch.rank == 1:  # one rank speaks for those who wait
            signals.say(f"waiting for rank 0 of {launch.world_size} at {_where()}")
    came = f"rank 0 of {launch.world_size} did not come"
    raise _found_here(f"{_where()}: {came} within timeout_s={timeout_s:g} s", launch)


def _address_facing(master: str) -> str:
    """Returns the address at which the other hosts, and that of `master`, reach this one."""
    family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        address = str(probe.getsockname()[0])
    # this is the master's host, and some hosts call themselves by a name of loopback
    return master if ipaddress.ip_address(address).is_loopback else address


def _hosted(host: str, port: int, timeout_s: float) -> c10d.TCPStore:
    """A store in this process. PyTorch's store has no authentication, so it listens at loopback
    alone if the name by which ranks know this host means that, else at all addresses.
    """
    place, options = ("127.0.0.1", port), dict[str, Any]()
    if host not in LOOPBACK:
        place = ("", port)
        if socket.has_dualstack_ipv6():
            options = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    listener = socket.create_server(place, backlog=1024, **options)  # all ranks come at once
    number, descriptor = listener.getsockname()[1], listener.detach()
    return c10d.TCPStore(
        "127.0.0.1",
        number,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=descriptor,
    )


def _client(
    host: str, port: int, timeout_s: float, answers_within_s: float = STORE_S
) -> c10d.TCPStore:
    """A connection to the store. Made in a separate thread, which is left behind if the other side
    does not answer: PyTorch would wait forever.
    """
    made: SimpleQueue[c10d.TCPStore | Exception] = SimpleQueue()

    def connect() -> None:
        limit = timedelta(seconds=timeout_s)
        try:
            made.put(c10d.TCPStore(host, port, wait_for_workers=False, timeout=limit))
        except Exception as error:
            made.put(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        client = made.get(timeout=min(answers_within_s, timeout_s))
    except Empty:
        raise TimeoutError("what listens there does not answer as a store") from None
    if isinstance(client, Exception):
        raise client
    return client


def _find(launch: Launch, host: str, port: int, timeout_s: float) -> None:
    """Waits until a process listens. PyTorch would wait silently, and fail with a page of C++
    frames.
    """
    for waited_s, word in _waiting(launch):
        try:
            socket.create_connection((host, port), timeout=PATIENT_S).close()
            return
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)
            reason = "that name is not known here" if unknown else "nobody listens there"
        if waited_s > (min(UNKNOWN_S, timeout_s) if unknown else timeout_s):
            break
        if word:
            signals.say(f"rank {launch.rank} waits for rank 0 at {_where()} ({reason})")
    line = f"{_where()}: rank {launch.rank} of {launch.world_size} did not find rank 0 ({reason})"
    raise _found_here(
        f"{line}; check that rank 0 runs, and correct the address where it is wrong", launch
    )


def _waiting(launch: Launch) -> Iterator[tuple[float, bool]]:
    """Polls ever more rarely. Yields the seconds since the first call, and once True, when it is
    time to tell the user.
    """
    began, pause_s, silent = time.monotonic(), 0.01, True
    while True:
        if launch.orphaned:
            signals.request_stop(SIGTERM)
        waited_s = time.monotonic() - began
        yield waited_s, silent and waited_s > PATIENT_S
        silent = waited_s <= PATIENT_S
        time.sleep(pause_s)
        pause_s = min(POLL_S, 1.1 * pause_s)


def _where() -> str:
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"


def _found_here(line: str, launch: Launch) -> ConfigError:
    """An error that only this rank has found."""
    return LocalError(line) if launch.rank else ConfigError(line)
