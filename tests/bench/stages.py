"""`make stages`: the classic digit net at every stage from one process to many ranks and nodes, and
one table of them.

Settings are variables: DATA=a folder with MNIST's idx files (else scikit-learn's digits), EPOCHS=5,
RANKS="1 2 4", WAYS="allreduce ddp fsdp exact", OUT=folder of the runs and of stages.md. Every stage
is `pretrain.py` as anybody starts it: by torchrun, or, inside of a Slurm allocation, by srun over
its nodes. A rerun does what is missing; who stops it finds in the table what is done.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from tests.bench.stage_table import WAYS, Stage, finished, measured, page
from tests.making import make_source
from tests.ranks import ROOT
from tests.runs import TORCHRUN
from utils import revision
from utils.errors import ConfigError
from utils.files import write_whole

BATCH, SHARDS = 64, 8
STOPPED = (130, 138, 143)  # exit statuses of runs that somebody has asked to stop
END_S = 60.0  # for ranks to save when they are stopped


class Settings:
    """The settings from environment variables."""

    def __init__(self) -> None:
        env = os.environ
        self.epochs = int(env.get("EPOCHS") or 5)
        self.data = str(Path(env["DATA"]).resolve()) if env.get("DATA") else None
        in_job = env.get("SLURM_JOB_ID")
        self.nodes = int(env.get("SLURM_JOB_NUM_NODES", "1")) if in_job else None
        self.ways = (env.get("WAYS") or " ".join([*WAYS][1:])).split()
        if unknown := [way for way in self.ways if way not in [*WAYS][1:]]:
            raise ConfigError(f"WAYS={unknown[0]}: choose of {', '.join([*WAYS][1:])}")
        given = [int(ranks) for ranks in env.get("RANKS", "").split()]
        self.ranks = given or self.usual_ranks()
        if uneven := [ranks for ranks in self.ranks if ranks % (self.nodes or 1)]:
            raise ConfigError(f"RANKS={uneven[0]}: not a multiple of the job's {self.nodes} nodes")
        dataset = "mnist" if self.data else "digits"
        out = Path(env.get("OUT") or ROOT / "runs" / "stages").resolve()
        self.folder = out / f"{dataset}-{self.epochs}"
        lengths = {"seed": 0, "shards": SHARDS, "global_batch_size": BATCH, "epochs": self.epochs}
        # names what is wrong with DATA
        self.length = make_source("digits", **lengths, dataset=dataset, data_path=self.data).length
        # in float32, as tutorials compute, and precise enough to see that what differs is rounding
        text = (
            f"arch=cnn data={dataset} optim=adadelta lr=1.0 weight_decay=0"
            f" global_batch_size={BATCH} epochs={self.epochs} eval_interval={self.epochs}"
            " arch.forward_dtype=float32 eval_batch_size=250 wandb.mode=disabled"
        )
        self.keys = [*text.split(), *([f"data_path={self.data}"] if self.data else [])]

    def usual_ranks(self) -> list[int]:
        """Returns the numbers of ranks that the machine or the job has room for."""
        most = torch.cuda.device_count() or 4
        if self.nodes is not None:
            most = int(os.environ.get("SLURM_NTASKS") or self.nodes)
        return [ranks for ranks in (1, 2, 4, 8) if ranks <= most and ranks % (self.nodes or 1) == 0]

    def stages(self) -> list[Stage]:
        """In the order in which they run."""
        return [
            Stage("one"),
            *(Stage(way, ranks, self.nodes) for way in self.ways for ranks in self.ranks),
        ]


def command(stage: Stage) -> list[str]:
    """Returns the command that starts its ranks."""
    if stage.way == "one":
        return [sys.executable, "pretrain.py"]
    if stage.nodes is None:
        alone = ["--standalone", "--nproc-per-node", str(stage.ranks)]
        return [*TORCHRUN, *alone, "pretrain.py"]
    per_node = [
        f"--nodes={stage.nodes}",
        f"--ntasks={stage.ranks}",
        f"--ntasks-per-node={stage.ranks // stage.nodes}",
    ]
    cpus = [f"--cpus-per-task={count}"] if (count := os.environ.get("SLURM_CPUS_PER_TASK")) else []
    return ["srun", *per_node, *cpus, "--kill-on-bad-exit=0", sys.executable, "pretrain.py"]


def run(command: Sequence[str], log: Path) -> str:
    """Returns what went wrong, in one line. Passes a request to stop on once, and waits."""
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    with open(log, "a") as said:
        before = said.tell()
        # A separate session: Ctrl-C would reach every rank from the terminal, and again from its
        # launcher
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True
        )
        try:
            status = process.wait()
        except KeyboardInterrupt:
            end(process)
            raise
    if status in STOPPED:
        raise KeyboardInterrupt
    if not status:
        return ""
    text = log.read_bytes()[before:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if line.startswith("error:")),
        lines[-1] if lines else "it said nothing",
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Runs save and end when they are asked to; a second request ends them at once."""
    try:
        process.terminate()
        process.wait(END_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def write(settings: Settings, failed: dict[Stage, str]) -> str:
    """The table of what is done so far, in stages.md too."""
    folders = {
        stage: settings.folder / path.name
        for path in settings.folder.glob("*")
        if (stage := Stage.named(path.name))
    }
    runs = {stage: run for stage, folder in folders.items() if (run := measured(folder))}
    head = (
        f"`python pretrain.py {' '.join(settings.keys)}`, {settings.length.total_steps:,} steps;"
        f" {revision.summary().splitlines()[0]}"
    )
    text = page(head, os.environ.get("OMP_NUM_THREADS", "1"), runs, failed)
    write_whole(settings.folder / "stages.md", text)
    return text


def main() -> int:
    """Exit status 1 if a stage failed, 2 if variables are wrong, 130 after Ctrl-C."""
    try:
        settings = Settings()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # both: a shell's background jobs begin with the first one ignored
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)
    failed: dict[Stage, str] = {}
    settings.folder.mkdir(parents=True, exist_ok=True)
    try:
        for stage in settings.stages():
            folder = settings.folder / stage.name
            if not finished(folder):
                print(f"{stage.name} …", flush=True)
                keys = [*settings.keys, *WAYS[stage.way][1], f"checkpoint_path={folder}"]
                log = settings.folder / f"{stage.name}.txt"
                if problem := run([*command(stage), *keys], log):
                    failed[stage] = f"failed: {problem}"
                    print(failed[stage], flush=True)
            write(settings, failed)
    except KeyboardInterrupt:
        print("stopped; the same again does the rest", flush=True)
    print(f"\n{write(settings, failed)}\nwritten: {settings.folder / 'stages.md'}", flush=True)
    missing = [stage for stage in settings.stages() if not finished(settings.folder / stage.name)]
    return 1 if failed else 130 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
