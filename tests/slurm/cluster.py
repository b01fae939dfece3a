"""A private Slurm with two nodes on this machine, for tests: separate daemons, as root, without
systemd and cgroups.
"""

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.ranks import clean_env, free_port, started, until

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")
# Jobs of `high` take nodes from jobs of `low`, which are told by the signal that they asked for,
# and go back into the queue.
CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters={parameters}
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
{nodes}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=30
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why a Slurm cannot be started here; empty where it can."""
    if os.geteuid() != 0:
        return "a private Slurm needs root"
    if absent := [name for name in (*DAEMONS, "sbatch") if not shutil.which(name)]:
        return f"no {absent[0]} here: apt-get install slurmctld slurmd slurm-client munge"
    return ""


class Cluster:
    """The interface of a cluster for tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, folder / "logs"
        self.logs.mkdir()
        self.env = clean_env(SLURM_CONF=str(folder / "slurm.conf"), PYTHONUNBUFFERED="1")

    def ask(self, *command: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """The answer of one of Slurm's commands."""
        process = started(command, env={**self.env, **(env or {})})
        out, err = process.communicate(timeout=100)
        assert not check or process.returncode == 0, f"{command}: {err or out}"
        return out.strip()

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """The number of a new job."""
        return self.ask(
            "sbatch", "--parsable", f"--output={self.logs}/%A-%a.log", *arguments, env=env
        )

    def about(self, job: str, what: str) -> str:
        """One field of what Slurm knows of a job."""
        fields = dict(
            field.partition("=")[::2]
            for field in self.ask("scontrol", "--oneliner", "show", "job", job).split()
        )
        return fields.get(what, "")

    def log(self, job: str) -> str:
        """Returns all that a job has printed, in all its starts."""
        file = self.logs / f"{job}-4294967294.log"  # the number of no member of an array
        return file.read_text(errors="replace") if file.exists() else ""

    def wait(self, job: str, true: Callable[[], bool], within: float = 100) -> None:
        """Until something comes true of a job."""

        def looked() -> bool:
            time.sleep(0.2)  # a look may be a question to Slurm
            return true()

        if not until(looked, within):
            raise AssertionError(
                f"job {job} is {self.about(job, 'JobState')} after {within:g}"
                f" s:\n{self.log(job)[-3000:]}"
            )

    def ended(self, job: str, within: float = 100) -> str:
        """How a job ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.wait(job, lambda: self.about(job, "JobState") in over, within)
        state = self.about(job, "JobState")
        if state == "FAILED":
            for log in self.folder.glob("*.log"):  # shown if a test fails
                print(*log.read_text().splitlines()[-60:], sep="\n")
        return state

    def starts_again(self, job: str, *changes: str) -> None:
        """Start a requeued job without Slurm's delay of two minutes, perhaps with other `changes`
        to it.
        """
        self.wait(
            job,
            lambda: (
                (self.about(job, "JobState"), self.about(job, "Reason")) == ("PENDING", "BeginTime")
            ),
        )
        # Its former start ends on all nodes first: the new one has the same number, and would be
        # killed with it. A step's daemon has a socket, n1_8.0, while it runs.
        left = (f"spool-*/job{int(job):05d}", f"spool-*/n?_{job}.*")
        self.wait(job, lambda: not any(any(self.folder.glob(names)) for names in left))
        states = ("sinfo", "-h", "-N", "-p", "low", "-o", "%t")
        self.wait(job, lambda: set(self.ask(*states).split()) == {"idle"})
        if changes:
            self.ask("scontrol", "update", f"JobId={job}", *changes)
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextmanager
def cluster(folder: Path, signals_at_preemption: bool = True) -> Iterator[Cluster]:
    """Started in a folder, and ended by the numbers of its processes."""
    folder.chmod(0o755)  # munged insists
    (folder / "state").mkdir()
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2"
        for name in NODES
    )
    parameters = "preempt_send_user_signal" if signals_at_preemption else ""
    config = CONFIG.format(
        folder=folder, host=host, control=free_port(), nodes=nodes, parameters=parameters
    )
    (folder / "slurm.conf").write_text(
        "".join(f"{line}\n" for line in config.splitlines() if not line.endswith("="))
    )
    made = Cluster(folder)
    files = "key-file=munge.key socket=munge.socket pid-file=munged.pid log-file=munged.log"
    options = [word.split("=") for word in f"{files} seed-file=munged.seed".split()]
    try:
        try:
            made.ask("munged", "--force", *(f"--{key}={folder}/{name}" for key, name in options))
            made.ask("slurmctld", "-c")
            for name in NODES:
                (folder / f"spool-{name}").mkdir()
                made.ask("slurmd", "-N", name)
            idle = ("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N")
            assert until(lambda: made.ask(*idle, check=False).split() == [*NODES], 20), made.ask(
                "sinfo", check=False
            )
        except AssertionError as error:
            pytest.skip(f"Slurm does not start here: {error}")
        yield made
    finally:
        made.ask("scancel", "--user=root", check=False)
        for name in (*NODES, "slurmctld", "munged"):
            with suppress(OSError, ValueError):
                _end(int((folder / f"{name}.pid").read_text()))


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{pid}").exists(), 10)
        os.kill(pid, signal.SIGKILL)
