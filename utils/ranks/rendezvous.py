"""How ranks find each other, and what they compare before they form a group: code, PyTorch, devices."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from utils.ranks.failure_server import Hub
from utils.ranks.failure_watch import Watch
from utils.ranks.key_file import offered, read_key
from utils.ranks.launchers import Launch, rendezvous

WORD_S = 5.0  # of waiting in silence; then a word is said
ANSWER_S = 30.0  # for what listens at the master's port to show that it is a store
UNKNOWN_S = 15.0  # for a name to become known, as those of a cluster's services do when their hosts have started
PATIENCE_S = 10.0  # of those who leave it to another to say that ranks are missing
LINGER_S = 1.0  # for the others to read why, before rank 0 takes the store away
POLL_S = 0.01

Told = dict[str, str]


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
        waiting = _Waiting(self.launch, self.timeout_s)
        while not self.store.check(keys):
            if self.store.check(["over"]):
                raise PeerError(self.store.get("over").decode())
            if waiting.over() or waiting.worth_a_word():
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                first = next((rank for rank in range(self.launch.world_size) if rank not in missing), 0)
                if missing and self.launch.rank == first:  # of those who are here
                    self._speak(missing, waiting.over())
                elif waiting.passed() > self.timeout_s + PATIENCE_S:
                    raise _own(f"{_where()}: rank {first} did not say whether all ranks have come; start the run again", self.launch)
            waiting.pause()

    def _speak(self, missing: list[int], over: bool) -> None:
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.launch.world_size}"
        if not over:
            signals.say(f"waiting for {who} at {_where()}")
            return
        line = f"{_where()}: {who} did not come within timeout_s={self.timeout_s:g} s; check that all ranks run and see one address"
        self.store.set("over", line)
        time.sleep(LINGER_S if self.launch.rank == 0 else 0)
        raise _own(line, self.launch)


class _Waiting:
    """How long somebody has been waiting, and whether it is time to say so."""

    def __init__(self, launch: Launch, most_s: float) -> None:
        self._launch = launch
        self._began, self._most_s, self._said, self._pause_s = time.monotonic(), most_s, False, POLL_S

    def passed(self) -> float:
        return time.monotonic() - self._began

    def over(self) -> bool:
        return self.passed() > self._most_s

    def worth_a_word(self) -> bool:
        """Once, after a while."""
        if self._said or self.passed() < WORD_S:
            return False
        self._said = True
        return True

    def pause(self) -> None:
        if self._launch.orphaned:  # there is no watch yet to notice it
            if self._launch.rank == 0:
                signals.say(f"{self._launch.launcher}, which started rank 0, is gone: stopped before training began")
            raise SystemExit(signals.STATUS[SIGTERM])
        time.sleep(self._pause_s)
        self._pause_s = min(0.2, 1.1 * self._pause_s)  # of many ranks none should keep the store busy


def meet(launch: Launch, timeout_s: float) -> Meeting:
    """Find the store: rank 0 hosts it, the others look for rank 0."""
    try:
        host, port = rendezvous(os.environ, launch, os.getppid())
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
        # torchrun keeps its store over a restart; an attempt must not meet the addresses that the last one left there.
        store = c10d.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        meeting = Meeting(store, host, port, launch, timeout_s)
        if agents:  # torchrun hosts this store. It may die before the run does, which then still has a checkpoint to write.
            if launch.rank == 0:
                own = _hosted(host := own_address(host), 0, timeout_s)
                store.set("store", f"{host} {own.port}")
            else:
                host, text = meeting.from_rank_0("store").split()
                own = _client(host, int(text), launch, timeout_s)
            meeting = replace(meeting, store=c10d.PrefixStore("run", own), host=host, port=own.port)
        if meeting.store.add(f"count/{launch.rank}", 1) > 1:
            raise _own(f"{_where()}: rank {launch.rank} is there already; give each process a number of its own", launch)
        return meeting


def watch(meeting: Meeting, told: Sequence[Told], folder: Path) -> Watch:
    """This rank's watch, connected to the hub. The key goes by a file in the folder if all see it, else by the store."""
    launch = meeting.launch
    with _meeting(launch):
        if launch.rank > 0:
            hub = json.loads(meeting.from_rank_0("hub"))
            key = read_key(hub["key_file"])
            meeting.store.set(f"sees_key/{launch.rank}", "yes" if key else "no")
            return Watch.join(hub["host"], hub["port"], meeting.from_rank_0("key") or key, launch, meeting.timeout_s, None)
        host, listen_at = reachable(meeting.host, [text["place"] for text in told], [text["master"] for text in told])
        with offered(folder) as (file, key):
            own = Hub(listen_at, launch.world_size, meeting.timeout_s, key)
            meeting.store.set("hub", json.dumps({"host": host, "port": own.port, "key_file": file}))
            seen = "no" not in meeting.gather("sees_key", "yes")
        meeting.store.set("key", "" if seen else key)
        return Watch.join(host, own.port, key, launch, meeting.timeout_s, own)


def exchange(meeting: Meeting, own: Told) -> list[Told]:
    """What every rank tells; ConfigError on all ranks where one runs other code or another PyTorch."""
    own = {**own, "host": socket.gethostname(), "place": place(), "master": address_of(meeting.host), "torch": torch.__version__}
    with _meeting(meeting.launch):
        meeting.store.set(f"code/{meeting.launch.rank}", json.dumps(revision.code_hashes()))
        told: list[Told] = [json.loads(text) for text in meeting.gather("told", json.dumps(own))]
        problem = _other_torch(told) or _other_code(meeting.store, told)
        meeting.part()
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

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    waiting = _Waiting(launch, min(ANSWER_S, timeout_s))
    while not made:
        if waiting.over():
            raise OSError("what listens there does not answer as a store")
        waiting.pause()
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _find(host: str, port: int, launch: Launch, timeout_s: float) -> None:
    """Wait until somebody listens there. PyTorch would wait without a word, and fail with a page of C++ frames."""
    waiting = _Waiting(launch, timeout_s)
    while True:
        try:
            socket.create_connection((host, port), timeout=WORD_S).close()
            return
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)
            reason = "that name is not known here" if unknown else "nobody listens there"
            if waiting.over() or (unknown and waiting.passed() > UNKNOWN_S):
                line = f"{_where()}: rank {launch.rank} of {launch.world_size} did not find rank 0 ({reason})"
                raise _own(f"{line}; check that rank 0 runs, and correct the address where it is wrong", launch) from None
            if waiting.worth_a_word():
                signals.say(f"rank {launch.rank} waits for rank 0 at {_where()} ({reason})")
        waiting.pause()


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
