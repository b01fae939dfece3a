"""How ranks find each other, and what they compare before they form a group: code, PyTorch, devices."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from signal import SIGTERM

import torch
import torch.distributed as c10d

from utils import revision
from utils.errors import ConfigError, LocalError, PeerError
from utils.ranks import signals
from utils.ranks.addresses import address_of, own_address, place, reachable
from utils.ranks.failure import LINGER_S
from utils.ranks.failure_server import FailureServer
from utils.ranks.failure_watch import Watch
from utils.ranks.key_file import offered, read_key
from utils.ranks.launchers import Launch, master_address

WORD_S = 5.0  # of waiting in silence; then a word is said
STORE_S = 30.0  # for what listens at the master's port to show that it is a store
UNKNOWN_S = 15.0  # for a name to become known, as those of a cluster's services do when their hosts have started
LEFT_TO_OTHERS_S = 10.0  # of those who leave it to another to say that ranks are missing
POLL_S = 0.01
OWN = "lockstep"  # under this name rank 0 tells in torchrun's store where its own is

Facts = dict[str, str]  # what a rank says of itself


@dataclass(frozen=True)
class Meeting:
    """The key-value store that all ranks share, and where it is: rank 0 hosts it."""

    store: c10d.Store
    host: str
    port: int
    launch: Launch
    timeout_s: float

    def client(self, prefix: str) -> c10d.Store:
        """A connection of its own, for a thread of its own: a call that blocks holds up all others on the same one."""
        return c10d.PrefixStore(prefix, _client(self.host, self.port, self.launch, self.timeout_s))

    def gather(self, stage: str, own: str) -> list[str]:
        """What every rank says at this stage."""
        self.store.set(f"{stage}/{self.launch.rank}", own)
        keys = [f"{stage}/{rank}" for rank in range(self.launch.world_size)]
        self._await(keys)
        return [text.decode() for text in self.store.multi_get(keys)]

    def from_rank_0(self, key: str) -> str:
        """What rank 0 says under this name."""
        self._await([key])
        return self.store.get(key).decode()

    def part(self) -> None:
        """Before an error that all ranks have found: rank 0, which hosts the store, goes when the others need it no more."""
        self.store.set(f"parted/{self.launch.rank}", "")
        if self.launch.rank == 0:
            self._await([f"parted/{rank}" for rank in range(self.launch.world_size)])

    def _await(self, keys: list[str]) -> None:
        """Polled, because a call that blocks could not say for whom it waits. The n-th key is rank n's."""
        for waited_s, word in _waiting(self.launch):
            if self.store.check(keys):
                return
            if self.store.check(["over"]):
                raise PeerError(self.store.get("over").decode())
            over = waited_s > self.timeout_s
            if over or word:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                first = next((rank for rank in range(self.launch.world_size) if rank not in missing), 0)
                if missing and self.launch.rank == first:  # of those who are here
                    self._speak(missing, over)
                elif waited_s > self.timeout_s + LEFT_TO_OTHERS_S:
                    raise _own(f"{_where()}: rank {first} did not say whether all ranks have come; start the run again", self.launch)

    def _speak(self, missing: list[int], over: bool) -> None:
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.launch.world_size}"
        if not over:
            signals.say(f"waiting for {who} at {_where()}")
            return
        line = f"{_where()}: {who} did not come within timeout_s={self.timeout_s:g} s; check that all ranks run and see one address"
        self.store.set("over", line)
        time.sleep(LINGER_S if self.launch.rank == 0 else 0)  # it takes the store away
        raise _own(line, self.launch)


def _waiting(launch: Launch) -> Iterator[tuple[float, bool]]:
    """Ask ever more rarely: gives the seconds that have passed, and, once after a while, that it is time for a word to the user."""
    began, pause_s, silent = time.monotonic(), POLL_S, True
    while True:
        waited_s = time.monotonic() - began
        yield waited_s, silent and waited_s > WORD_S
        silent = waited_s <= WORD_S
        if launch.orphaned:  # there is no watch yet to notice it
            if launch.rank == 0:
                signals.say(f"{launch.launcher}, which started rank 0, is gone: stopped before training began")
            raise SystemExit(signals.STATUS[SIGTERM])
        time.sleep(pause_s)
        pause_s = min(0.2, 1.1 * pause_s)  # of many ranks none should keep the store busy


def meet(launch: Launch, timeout_s: float) -> Meeting:
    """Find the store: rank 0 hosts it, the others look for rank 0."""
    try:
        host, port = master_address(os.environ, launch, os.getppid())
    except ConfigError as error:  # what a launcher sets is wrong on all ranks alike; what is set by hand may be so here alone
        raise _own(str(error), launch) if launch.launcher == "env" else error from None
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)  # where PyTorch looks for them
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    with _meeting(launch):
        if launch.rank == 0 and not agents:
            store: c10d.Store = _hosted(host, port, timeout_s)
        else:
            _find(host, port, launch, timeout_s)
            store = _client(host, port, launch, timeout_s)
        meeting = Meeting(store, host, port, launch, timeout_s)
        if agents:  # torchrun hosts this store. It may die before the run does, which then still has a checkpoint to write.
            if launch.rank == 0:
                own = _hosted(host := own_address(host), 0, timeout_s)
                store.set(OWN, f"{host} {own.port}")
            else:
                host, own = _own_store(meeting)
            meeting = replace(meeting, store=c10d.PrefixStore("run", own), host=host, port=own.port)
        if meeting.store.add(f"count/{launch.rank}", 1) > 1:
            raise _own(f"{_where()}: rank {launch.rank} is there already; give each process a number of its own", launch)
        return meeting


def _own_store(meeting: Meeting) -> tuple[str, c10d.TCPStore]:
    """Rank 0's, whose address stands in torchrun's store; but that outlives a restart, and the address may be of an attempt that failed.

    No number tells attempts apart: torchrun counts, on every node, the failures there. But who has failed is gone when anybody starts
    again, and where a rank of this number has come before, it was in another attempt.
    """
    launch = meeting.launch
    for waited_s, word in _waiting(launch):
        if meeting.store.check([OWN]):
            host, port = meeting.store.get(OWN).decode().split()
            with suppress(OSError, c10d.DistError):
                socket.create_connection((host, int(port)), timeout=WORD_S).close()
                own = _client(host, int(port), launch, meeting.timeout_s)
                if own.add(f"came/{launch.rank}", 1) == 1:
                    return host, own
        if waited_s > meeting.timeout_s:
            raise _own(f"{_where()}: rank 0 of {launch.world_size} did not come within timeout_s={meeting.timeout_s:g} s", launch)
        if word and launch.rank == 1:  # of those who wait
            signals.say(f"waiting for rank 0 of {launch.world_size} at {_where()}")
    raise AssertionError


def join_watch(meeting: Meeting, facts: Sequence[Facts], folder: Path) -> Watch:
    """Connected to the failure server. The key goes by a file in the folder if all see it, else by the store."""
    launch = meeting.launch
    with _meeting(launch):
        if launch.rank > 0:
            server = json.loads(meeting.from_rank_0("server"))
            key = read_key(server["key_file"])
            meeting.store.set(f"sees_key/{launch.rank}", "yes" if key else "no")
            return Watch(server["host"], server["port"], meeting.from_rank_0("key") or key, launch, meeting.timeout_s)
        host, listen_at = reachable(meeting.host, [each["place"] for each in facts], [each["master"] for each in facts])
        with offered(folder) as (file, key):
            own = FailureServer(listen_at, launch.world_size, meeting.timeout_s, key)
            meeting.store.set("server", json.dumps({"host": host, "port": own.port, "key_file": file}))
            seen = "no" not in meeting.gather("sees_key", "yes")
        meeting.store.set("key", "" if seen else key)
        return Watch(host, own.port, key, launch, meeting.timeout_s, own)


def exchange(meeting: Meeting, own: Facts) -> list[Facts]:
    """What every rank says of itself; ConfigError on all ranks where one runs other code or another PyTorch."""
    own = {**own, "host": socket.gethostname(), "place": place(), "master": address_of(meeting.host), "torch": torch.__version__}
    with _meeting(meeting.launch):
        meeting.store.set(f"code/{meeting.launch.rank}", json.dumps(revision.code_hashes()))
        facts: list[Facts] = [json.loads(text) for text in meeting.gather("facts", json.dumps(own))]
        problem = _difference(meeting.store, facts)
        meeting.part()
    if problem:
        raise ConfigError(problem)
    return facts


def _difference(store: c10d.Store, facts: Sequence[Facts]) -> str:
    """The first rank that runs something else than rank 0; nothing, as a rule."""
    first = store.get("code/0")
    for rank, each in enumerate(facts):
        who = f"rank {rank} (host {each['host']}) runs"
        if each["torch"] != facts[0]["torch"]:
            return f"{who} PyTorch {each['torch']} and rank 0 {facts[0]['torch']}; use one environment on all hosts"
        if (other := store.get(f"code/{rank}")) != first:
            there, here = json.loads(other), json.loads(first)
            file = min(name for name in {*there, *here} if there.get(name) != here.get(name))
            how = "differs" if file in there and file in here else "is there and not here" if file in there else "is missing there"
            return f"{who} other code than rank 0: {file} {how}; use one checkout on all hosts"
    return ""


def _hosted(host: str, port: int, timeout_s: float) -> c10d.TCPStore:
    """A store in this process. PyTorch's asks nobody who he is, so it listens no further than it must."""
    alone = host in ("127.0.0.1", "localhost")
    dual = socket.has_dualstack_ipv6() and not alone
    listener = socket.create_server(
        ("127.0.0.1" if alone else "", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=1024
    )
    # whatever the others call this host, its own way to the store is the shortest one
    own, fd = ("127.0.0.1", listener.getsockname()[1]), listener.detach()
    return c10d.TCPStore(*own, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), master_listen_fd=fd)


def _client(host: str, port: int, launch: Launch, timeout_s: float) -> c10d.TCPStore:
    """A connection to the store. Made in a thread, because PyTorch waits for ever for what accepts and does not answer."""
    made: list[c10d.TCPStore | Exception] = []

    def make() -> None:
        try:
            made.append(c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)))
        except Exception as error:
            made.append(error)

    threading.Thread(target=make, daemon=True).start()
    for waited_s, _ in _waiting(launch):
        if made:
            break
        if waited_s > min(STORE_S, timeout_s):
            raise OSError("what listens there does not answer as a store")
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _find(host: str, port: int, launch: Launch, timeout_s: float) -> None:
    """Wait until somebody listens there. PyTorch would wait without a word, and fail with a page of C++ frames."""
    for waited_s, word in _waiting(launch):
        try:
            socket.create_connection((host, port), timeout=WORD_S).close()
            return
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)
            reason = "that name is not known here" if unknown else "nobody listens there"
            if waited_s > (min(UNKNOWN_S, timeout_s) if unknown else timeout_s):
                line = f"{_where()}: rank {launch.rank} of {launch.world_size} did not find rank 0 ({reason})"
                raise _own(f"{line}; check that rank 0 runs, and correct the address where it is wrong", launch) from None
            if word:
                signals.say(f"rank {launch.rank} waits for rank 0 at {_where()} ({reason})")


def _where() -> str:
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"


@contextmanager
def _meeting(launch: Launch) -> Iterator[None]:
    try:
        yield
    except (c10d.DistError, OSError) as error:
        reason = str(error).partition("Exception raised from")[0]
        raise _own(
            f"{_where()}: rank {launch.rank} of {launch.world_size} could not meet the others ({' '.join(reason.split())[:160]}); "
            "check that all ranks run and see the same address, or export another MASTER_PORT",
            launch,
        ) from None


def _own(line: str, launch: Launch) -> ConfigError:
    """What this rank has found, and no other may say in its place."""
    return LocalError(line) if launch.rank else ConfigError(line)
