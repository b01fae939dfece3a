"""How ranks find each other, and what they compare before they form a group: code, PyTorch,
devices.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as c10d

from utils import revision
from utils.errors import ConfigError, LocalError, PeerError
from utils.ranks import same_host, signals
from utils.ranks.addresses import listen, own_address
from utils.ranks.connection import Connection
from utils.ranks.failure_server import FailureServer
from utils.ranks.failure_watch import Watch
from utils.ranks.launchers import Launch, master_address, surely_on_one_host

WORD_S = 5.0  # how long a rank waits before the user hears of it
STORE_S = 30.0  # how long whatever listens at the master's port may take to answer as a store
# for a name to become known, as those of a cluster's services do when their hosts have started
UNKNOWN_S = 15.0
POLL_S = 0.01
OWN = "lockstep"  # the key in torchrun's store under which rank 0 publishes the address of its own

Facts = dict[str, str]  # what a rank says about itself
Enlist = Callable[[Watch], None]


@dataclass(frozen=True)
class Meeting:
    """The key-value store that all ranks share; rank 0 hosts it."""

    store: c10d.Store
    host: str
    port: int
    launch: Launch
    timeout_s: float

    def client(self, prefix: str) -> c10d.Store:
        """Another connection, for another thread: a call that blocks holds up all others on its
        connection.
        """
        return c10d.PrefixStore(prefix, _client(self.host, self.port, self.launch, self.timeout_s))

    def gather(self, stage: str, own: str) -> list[str]:
        """Returns the message of every rank at this stage. The watch ends a wait that takes too
        long.
        """
        self.store.set(f"{stage}/{self.launch.rank}", own)
        keys = [f"{stage}/{rank}" for rank in range(self.launch.world_size)]
        for _ in _waiting():
            if self.store.check(keys):
                break
        return [text.decode() for text in self.store.multi_get(keys)]


def _waiting() -> Iterator[tuple[float, bool]]:
    """Poll ever more rarely. Yields the seconds since the first call, and once whether it is time
    for a word to the user.
    """
    began, pause_s, silent = time.monotonic(), POLL_S, True
    while True:
        waited_s = time.monotonic() - began
        yield waited_s, silent and waited_s > WORD_S
        silent = waited_s <= WORD_S
        time.sleep(pause_s)
        pause_s = min(0.2, 1.1 * pause_s)  # many ranks must not keep the store busy


def meet(launch: Launch, timeout_s: float, enlist: Enlist) -> Meeting:
    """Find the store: rank 0 hosts it, the others look for rank 0. `enlist` gets this rank's watch
    as soon as there is one.
    """
    try:
        host, port = master_address(os.environ, launch, os.getppid())
    except ConfigError as error:
        # a launcher's mistake is the same on all ranks; one made by hand may be on this rank alone
        raise _own(str(error), launch) if launch.launcher == "env" else error from None
    # where PyTorch looks for them
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    begin = _host if launch.rank == 0 else _join
    with _meeting(launch):
        return begin(launch, host, port, timeout_s, enlist)


def _uses_agents() -> bool:
    """Returns whether torchrun hosts a store at MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _host(launch: Launch, host: str, port: int, timeout_s: float, enlist: Enlist) -> Meeting:
    """Rank 0: start the failure server, then the store. torchrun's store may die before the run
    does, which then still has a checkpoint to write; so rank 0 hosts one of its own.
    """
    agents, master = _uses_agents(), host
    if agents:
        host = "127.0.0.1" if surely_on_one_host(os.environ, launch) else own_address(master)
    door = listen(host, 0)
    number = door.getsockname()[1]  # now: the server closes it once all ranks have come
    listeners = [door, *same_host.listener()]
    server = FailureServer(listeners, launch.world_size, timeout_s, _where())
    own = Connection(server.local)
    own.send({"rank": 0})
    enlist(Watch(own, launch, timeout_s, _where(), server))
    if agents:
        _find(launch, master, port, timeout_s)
        theirs = _client(master, port, launch, timeout_s)
        store = _hosted(host, 0, timeout_s)
        theirs.set(OWN, f"{host} {store.port}")
    else:
        store = _hosted(host, port, timeout_s)
    store.set("failure_server", str(number))
    return Meeting(c10d.PrefixStore("run", store), host, store.port, launch, timeout_s)


def _join(launch: Launch, host: str, port: int, timeout_s: float, enlist: Enlist) -> Meeting:
    """Other ranks: find the store, and the failure server unless it is on this host."""
    early = same_host.connection()
    waiting: AbstractContextManager[None] = nullcontext()
    if early is not None:
        watch = Watch(early, launch, timeout_s, _where())
        enlist(watch)
        waiting = watch.waiting()
    with waiting:
        _find(launch, host, port, timeout_s)
        store = _client(host, port, launch, timeout_s)
        if _uses_agents():
            host, store = _own_store(store, launch, timeout_s)
    if early is None:
        number = int(store.get("failure_server"))
        connected = socket.create_connection((host, number), timeout=min(30.0, timeout_s))
        connection = Connection(connected)
        connection.send({"rank": launch.rank})
        enlist(Watch(connection, launch, timeout_s, _where()))
    return Meeting(c10d.PrefixStore("run", store), host, store.port, launch, timeout_s)


def _own_store(
    theirs: c10d.TCPStore, launch: Launch, timeout_s: float
) -> tuple[str, c10d.TCPStore]:
    """Rank 0's store, whose address is in torchrun's; but that outlives a restart, and the address
    may be from an attempt that failed.

    No number tells attempts apart, because torchrun counts failures on each node. But the ranks of
    a failed attempt are gone before the next one, and if a rank with this number has been here, it
    was in another attempt.
    """
    for waited_s, word in _waiting():
        if theirs.check([OWN]):
            host, port = theirs.get(OWN).decode().split()
            with suppress(OSError, c10d.DistError):
                socket.create_connection((host, int(port)), timeout=WORD_S).close()
                own = _client(host, int(port), launch, timeout_s)
                if own.add(f"came/{launch.rank}", 1) == 1:
                    return host, own
        if waited_s > timeout_s:
            break
        if word and launch.rank == 1:  # one rank speaks for those who wait
            signals.say(f"waiting for rank 0 of {launch.world_size} at {_where()}")
    came = f"rank 0 of {launch.world_size} did not come"
    raise _own(f"{_where()}: {came} within timeout_s={timeout_s:g} s", launch)


def exchange(meeting: Meeting, own: Facts) -> list[Facts]:
    """Exchanges what every rank runs; all ranks raise if one runs other code or another PyTorch."""
    own = {**own, "host": socket.gethostname(), "torch": torch.__version__}
    with _meeting(meeting.launch):
        meeting.store.set(f"code/{meeting.launch.rank}", json.dumps(revision.code_hashes()))
        facts: list[Facts] = [json.loads(text) for text in meeting.gather("facts", json.dumps(own))]
        problem = _difference(meeting.store, facts)
    if problem:
        raise found_by_all(problem, meeting.launch)
    return facts


def found_by_all(problem: str, launch: Launch) -> ConfigError | PeerError:
    """The error to raise where all ranks find the same problem: rank 0 reports it."""
    return ConfigError(problem) if launch.rank == 0 else PeerError(problem)


def _difference(store: c10d.Store, facts: Sequence[Facts]) -> str:
    """Returns what the first rank that differs from rank 0 runs; empty if none differs."""
    first = store.get("code/0")
    for rank, each in enumerate(facts):
        who = f"rank {rank} (host {each['host']}) runs"
        if each["torch"] != facts[0]["torch"]:
            return (
                f"{who} PyTorch {each['torch']} and rank 0 {facts[0]['torch']}; use one environment"
                " on all hosts"
            )
        if (other := store.get(f"code/{rank}")) != first:
            there, here = json.loads(other), json.loads(first)
            file = min(name for name in {*there, *here} if there.get(name) != here.get(name))
            how = (
                "differs"
                if file in there and file in here
                else "is there and not here"
                if file in there
                else "is missing there"
            )
            return f"{who} other code than rank 0: {file} {how}; use one checkout on all hosts"
    return ""


def _hosted(host: str, port: int, timeout_s: float) -> c10d.TCPStore:
    """A store in this process. PyTorch's store has no authentication, so it listens no further than
    it must.
    """
    listener = listen(host, port)
    # whatever the others call this host, loopback is the shortest way to the store
    number, descriptor = listener.getsockname()[1], listener.detach()
    return c10d.TCPStore(
        "127.0.0.1",
        number,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=descriptor,
    )


def _client(host: str, port: int, launch: Launch, timeout_s: float) -> c10d.TCPStore:
    """A connection to the store, made in a thread because PyTorch waits for ever if whatever
    listens does not answer.
    """
    made: list[c10d.TCPStore | Exception] = []
    limit = timedelta(seconds=timeout_s)

    def make() -> None:
        try:
            client = c10d.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=limit
            )
            made.append(client)
        except Exception as error:
            made.append(error)

    threading.Thread(target=make, daemon=True).start()
    for waited_s, _ in _waiting():
        if made:
            break
        if waited_s > min(STORE_S, timeout_s):
            raise OSError("what listens there does not answer as a store")
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _find(launch: Launch, host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody listens. PyTorch would wait in silence, and fail with a page of C++
    frames.
    """
    for waited_s, word in _waiting():
        try:
            socket.create_connection((host, port), timeout=WORD_S).close()
            return
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)
            reason = "that name is not known here" if unknown else "nobody listens there"
        if waited_s > (min(UNKNOWN_S, timeout_s) if unknown else timeout_s):
            break
        if word:
            signals.say(f"rank {launch.rank} waits for rank 0 at {_where()} ({reason})")
    line = f"{_where()}: rank {launch.rank} of {launch.world_size} did not find rank 0 ({reason})"
    raise _own(f"{line}; check that rank 0 runs, and correct the address where it is wrong", launch)


def _where() -> str:
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"


@contextmanager
def _meeting(launch: Launch) -> Iterator[None]:
    try:
        yield
    except (c10d.DistError, OSError) as error:
        reason = str(error).partition("Exception raised from")[0]
        raise _own(
            f"{_where()}: rank {launch.rank} of {launch.world_size} could not meet the others"
            f" ({' '.join(reason.split())[:160]}); check that all ranks run and see the same"
            " address, or export another MASTER_PORT",
            launch,
        ) from None


def _own(line: str, launch: Launch) -> ConfigError:
    """An error that only this rank has found."""
    return LocalError(line) if launch.rank else ConfigError(line)
