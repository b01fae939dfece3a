"""launch/elastic.sh: hosts join, leave and are lost, and the run stays the same run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_env, free_port, until
from tests.runs import EXACT, QUIET, TINY_TRM, digest, status, train

SCRIPT = str(ROOT / "launch" / "elastic.sh")
LENGTH = ["epochs=null", "eval_interval=null", "max_steps=700"]  # as long as hosts take to join
RUN = [*TINY_TRM, *EXACT, *LENGTH, *QUIET]


class Hosts:
    """Agents that a test starts and ends; each is as one host would be."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.started = folder, folder / "run", 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        """The script, in a separate session."""
        self.started += 1
        with (self.folder / f"{self.started}.out").open("wb") as out:
            process = subprocess.Popen(
                [SCRIPT, *arguments],
                env=clean_env(PYTHON=sys.executable, PET_LOCAL_ADDR="127.0.0.1", **variables),
                cwd=self.folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def output(self) -> str:
        """Everything that was printed."""
        return "".join(
            (self.folder / f"{number}.out").read_text() for number in range(1, self.started + 1)
        )

    def agent(self) -> subprocess.Popen[bytes]:
        """A host that joins."""
        store = f"127.0.0.1:{self.port}"
        return self.start(*RUN, f"checkpoint_path={self.run}", STORE=store, WAIT_S="2")

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """Everything on a host ends at once, and nothing is said."""
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in (agent.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def trains(self, ranks: int, starts: int) -> None:
        """Wait until the given start, on so many ranks, is some steps further."""
        log, metrics = self.run / "log.txt", self.run / "metrics.jsonl"
        sizes = re.compile(r"(\d+) ranks? by torchrun")

        def begun() -> bool:
            return log.exists() and len(sizes.findall(log.read_text())) >= starts

        assert until(begun, 90), self.output()[-3000:]
        assert int(sizes.findall(log.read_text())[starts - 1]) == ranks, log.read_text()
        before = metrics.read_text().count("train/loss") if metrics.exists() else 0
        assert until(
            lambda: metrics.exists() and metrics.read_text().count("train/loss") >= before + 8, 60
        ), self.output()[-3000:]


@contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    made = Hosts(folder)
    try:
        made.start("store", PORT=str(made.port))
        assert until(lambda: f":{made.port}" in made.output(), 30), made.output()
        yield made
    finally:
        for process in made.processes:
            if process.poll() is None:
                made.lose(process)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_hosts_join_leave_and_are_lost_and_the_digest_is_that_of_one_process(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path) as there:
        first = there.agent()
        there.trains(ranks=1, starts=1)
        second = there.agent()
        there.trains(ranks=2, starts=2)
        there.lose(first)  # it hosted rank 0
        there.trains(ranks=1, starts=3)
        third = there.agent()
        there.trains(ranks=2, starts=4)
        second.terminate()
        assert second.wait(40) != 0
        assert third.wait(150) == 0, there.output()[-3000:]
    assert status(there.run)["state"] == "finished"
    alone = train(tmp_path / "alone", *RUN)
    assert digest(there.run) == digest(alone.directory)


@pytest.mark.slow
def test_a_store_prints_its_address_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    with hosts(tmp_path) as there:
        assert re.fullmatch(rf"STORE=[^:]+:{there.port}\n", there.output())
        taken = there.start("store", PORT=str(there.port))
        assert taken.wait(30) == 1
        said = f"PORT={there.port}: cannot listen there; give another, for example PORT=29401\n"
        assert there.output().endswith(said)
        there.processes[0].terminate()
        assert there.processes[0].wait(10) == 0
