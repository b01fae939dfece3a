"""The table of stages, made of what its runs have left behind: `tests.bench.stages` starts them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.checkpoint.reader import digest
from utils.files import read_row
from utils.sweep.table import result

# In the order of the table: what a way is called, and the keys that make it
WAYS = {
    "one": ("one process", []),
    "allreduce": ("`sync=allreduce`", ["sync=allreduce"]),
    "ddp": ("`sync=ddp`", ["sync=ddp"]),
    "fsdp": ("`sync=fsdp`", ["sync=fsdp"]),
    "exact": ("`exact=true`", ["exact=true"]),
}
COLUMNS = (
    "stage | samples/s | epoch, s | speed-up | efficiency | peak MiB of rank 0 | test accuracy |"
    " test loss | loss of steps 1–10, from one process | test loss, from one process | accuracy,"
    " from one process | sha256"
)
NOTES = (
    "Samples/s: the median of what was logged every 10 steps, evaluations apart. Speed-up is"
    " against one process, efficiency is by rank. Every test image counts once. Ranks add gradients"
    " in another order, so that weights differ by rounding, which training makes larger; with"
    " `exact=true` they do not differ. The sha256 is over all tensors of the last checkpoint."
)


@dataclass(frozen=True)
class Stage:
    """One row; `nodes` of a Slurm job, none where torchrun starts the ranks."""

    way: str
    ranks: int = 1
    nodes: int | None = None

    @property
    def name(self) -> str:
        """The name of its run's folder."""
        return f"{self.way}-{self.ranks}" + (f"-on-{self.nodes}-nodes" if self.nodes else "")

    @classmethod
    def named(cls, name: str) -> Stage | None:
        """Which stage a folder is of."""
        match = re.fullmatch(rf"({'|'.join(WAYS)})-(\d+)(?:-on-(\d+)-nodes)?", name)
        return cls(match[1], int(match[2]), int(match[3]) if match[3] else None) if match else None

    @property
    def text(self) -> str:
        """For people."""
        if self.way == "one":
            return WAYS["one"][0]
        where = f" on {self.nodes} node{'s' * (self.nodes > 1)} (srun)" if self.nodes else ""
        return f"{WAYS[self.way][0]}, {self.ranks} rank{'s' * (self.ranks > 1)}{where}"

    @property
    def place(self) -> tuple[int, int, int]:
        """In the table."""
        return [*WAYS].index(self.way), self.nodes or 0, self.ranks


@dataclass(frozen=True)
class Measured:
    """The results that a finished run reports."""

    samples_per_s: float
    epoch_s: float
    peak_bytes: float
    accuracy: float
    tested: int
    loss: float
    first_loss: float
    digest: str
    machine: str


def measured(folder: Path) -> Measured | None:
    """None of a run that has not finished."""
    if not finished(folder):
        return None
    rows = rows_of(folder)
    training = [row for row in rows if "speed/step_ms" in row]
    tests = [row for row in rows if "eval/accuracy" in row]
    said = re.findall(r"\d+ ranks?(?: by \w+)? on (.*)", (folder / "log.txt").read_text())
    return Measured(
        samples_per_s=speed(training, "speed/examples_per_s"),
        epoch_s=result(folder).seconds / training[-1]["epoch"],
        peak_bytes=max(row["memory/peak_bytes"] for row in training),
        accuracy=tests[-1]["eval/accuracy"],
        tested=round(tests[-1]["eval/accuracy_n"]),
        loss=tests[-1]["eval/loss"],
        first_loss=training[0]["train/loss"],
        digest=digest(folder),
        machine=said[-1],
    )


def finished(folder: Path) -> bool:
    """True if a run has ended well."""
    return read_row(folder / "status.json").get("state") == "finished"


def rows_of(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def speed(rows: Iterable[Mapping[str, float]], name: str) -> float:
    """The median over what was logged; first steps allocate memory, and count where nothing else
    was logged.
    """
    values = [row[name] for row in rows]
    return statistics.median(values[1:] or values)


def page(
    head: str, threads: str, runs: Mapping[Stage, Measured], failed: Mapping[Stage, str]
) -> str:
    """All of stages.md."""
    machines = sorted({run.machine for run in runs.values()})
    lines = [head, *(f"Computed on {machine}; OMP_NUM_THREADS={threads}." for machine in machines)]
    if len({machine.partition(":")[2] for machine in machines}) > 1:
        lines.append("These machines differ: speed-ups compare one with another.")
    return "\n".join([*lines, "", table(runs, failed), "", NOTES, ""])


def table(runs: Mapping[Stage, Measured], failed: Mapping[Stage, str]) -> str:
    """Markdown. Speed-ups and differences are against one process."""
    one = runs.get(Stage("one"))
    lines = [f"| {COLUMNS} |", f"|{'---|' * (COLUMNS.count('|') + 1)}"]
    for stage in sorted({*runs, *failed}, key=lambda stage: stage.place):
        lines.append(
            row(stage, runs[stage], one) if stage in runs else line(stage.text, failed[stage])
        )
    return "\n".join(lines)


def line(stage: str, says: str) -> str:
    """A row that fills the first columns alone."""
    return f"| {stage} | {says} |{' |' * (COLUMNS.count('|') - 1)}"


def row(stage: Stage, run: Measured, one: Measured | None) -> str:
    """One line of the table."""
    gain = run.samples_per_s / one.samples_per_s if one else None
    cells = [
        stage.text,
        f"{run.samples_per_s:,.0f}",
        f"{run.epoch_s:.1f}",
        f"{gain:.2f}" if gain else "–",
        f"{gain / stage.ranks:.0%}" if gain else "–",
        f"{run.peak_bytes / 2**20:,.0f}",
        f"{run.accuracy:.2%} of {run.tested:,}",
        f"{run.loss:.4f}",
        *differences(stage, run, one),
        f"`{run.digest[:8]}`",
    ]
    return f"| {' | '.join(cells)} |"


def differences(stage: Stage, run: Measured, one: Measured | None) -> list[str]:
    """How far a run is from one process; weights of the same sha256 need no more words."""
    if one is None or stage == Stage("one"):
        return ["–"] * 3
    if run.digest == one.digest:
        return ["the same bits"] * 3
    points = 100 * (run.accuracy - one.accuracy)
    return [
        f"{run.first_loss - one.first_loss:+.1e}",
        f"{run.loss - one.loss:+.4f}",
        f"{points:+.2f} points",
    ]
