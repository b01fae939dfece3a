"""Proves by training that a command is the same run however it is run: `python -m utils.prove`,
then the keys of a run.

Trains `max_steps` steps, 6 unless given, with `exact=true`: once straight, and then in other ways
that must not matter. Compares all tensors and metrics. An exact run hands a loss one shard at a
time, so it also trains without: once with the whole batch in one pass, and once in parts. These may
differ by the rounding of float64. Exit status 1 if a run is another one.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from utils.checkpoint.reader import digest
from utils.errors import ConfigError, exit_status
from utils.prove.causes import CAUSES, difference
from utils.prove.rounding import TOLERANCE, beyond_rounding
from utils.prove.runs import Run, Way, start
from utils.rundir.records import read_config, read_events

STEPS = 6


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    others: list[str] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return exit_status(lambda: prove(arguments, others)) or int(bool(others))


def prove(arguments: Sequence[str], others: list[str]) -> str:
    """Trains and compares; puts the names of runs that differ into `others`. Returns the result."""
    given = [each.partition("=")[2] for each in arguments if each.startswith("max_steps=")]
    if not (text := (given or [str(STEPS)])[-1]).isdecimal() or int(text) < 2:
        raise ConfigError(f"max_steps={text}: a run is stopped half way; give 2 or more")
    steps, half = int(text), int(text) // 2
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="prove-", dir=runs))
    keys = [f"max_steps={steps}", f"checkpoint_interval={half}"]
    from_half = f"resume={folder}/straight/checkpoints/step_{half}"
    waves = [
        [
            Way("straight", "", forked=False),
            Way("again", "another process, another PYTHONHASHSEED"),
        ],
        [Way("two ranks", "", ["backend=gloo"], ranks=2, forked=False)],
        [
            Way("resumed", f"after step {half}", [from_half]),
            Way("loader", "one process loads", ["num_workers=1"]),
        ],
    ]
    print(f"{steps} steps with exact=true in five ways, then whole and in parts:", flush=True)
    began = time.monotonic()
    running: list[Run] = []
    try:
        for wave in waves:
            running = []
            for way in wave:  # one by one: an interrupt may come between two
                running.append(start(arguments, keys, way, folder))
            for run in running:
                _judge(run, folder / "straight", others)
        for precision in TOLERANCE:
            running = []
            for way in _whole_and_in_parts(folder / "straight", precision):
                running.append(start(arguments, keys, way, folder))
            whole, parts = running
            # a net that cannot compute in float64 ends with its usual error
            if _judge_parts(whole, parts, precision, others):
                break
    finally:
        for run in running:
            run.kill()
        if not others:
            shutil.rmtree(folder)
    if others:
        return (
            f"Not one run: {', '.join(others)}. The runs are in {folder}; python -m utils.report"
            f" {folder}/straight {folder}/{others[0].replace(' ', '-')} shows two of them."
        )
    seconds = time.monotonic() - began
    return f"One run, to the last bit of every tensor and metric ({seconds:.0f} s)."


def _whole_and_in_parts(straight: Path, precision: str) -> list[Way]:
    """Returns two ways that differ in how many rows a loss sees at once."""
    config = read_config(straight)
    started = next(row for row in read_events(straight) if row["event"] == "started")
    shard_size = started["examples_per_step"] // config["shards"]
    # their evaluations are not compared
    keys = ["exact=false", "eval_examples=1", f"float64={precision == 'float64'}".lower()]
    if "forward_dtype" in config["arch"]:
        keys.append(f"arch.forward_dtype={precision}")
    one_shard = [*keys, f"micro_batch_size={shard_size}", "backend=gloo"]
    return [
        Way(f"whole {precision}", "", [*keys, "micro_batch_size=null"]),
        Way(f"parts {precision}", "", one_shard, ranks=2),
    ]


def _judge_parts(whole: Run, parts: Run, precision: str, others: list[str]) -> bool:
    """Waits for the two runs and prints a row about them. Returns False, and prints nothing, if
    they should be tried in a lower precision.
    """
    ended = [run for run in (whole, parts) if run.wait()]
    if ended and precision != [*TOLERANCE][-1]:
        return False
    row, cause = f"the same but for rounding (two ranks, one shard at a time, {precision})", ""
    if ended:
        row = f"ended: {ended[0].error}"
    elif found := beyond_rounding(whole.folder, parts.folder, TOLERANCE[precision]):
        row, cause = f"another run. {found}", CAUSES["parts"]
    if ended or cause:
        others.append(parts.way.name)
    _print_row("parts", row, cause)
    return True


def _print_row(name: str, row: str, cause: str) -> None:
    print(f"  {name:10} {row}", flush=True)
    if cause:
        print(f"  {'':10} {cause}", flush=True)


def _judge(run: Run, straight: Path, others: list[str]) -> None:
    """Waits for a run. Prints a row about it, and why it may be another than the straight one."""
    way, status = run.way, run.wait()
    if status and way.name == "straight":
        if status == 2:
            raise ConfigError(run.error)
        print(run.errors.read_text(errors="replace").strip(), file=sys.stderr)
        raise ConfigError(f"the run ended with exit status {status}; correct that first")
    cause = ""
    if way.name == "straight":
        row = digest(run.folder)
    elif status and way.name == "loader":  # data that must be read in the training process
        row = f"not possible: {run.error}"
    elif status:
        others.append(way.name)
        row = f"ended: {run.error}"
    else:
        found, cause = difference(straight, run.folder, way.name)
        others += [way.name] if found else []
        about = f" ({way.about})" if way.about else ""
        row = f"another run. {found}" if found else f"the same{about}"
    # where two equal runs differ, all others do, and what they do differently is no cause
    _print_row(way.name, row, "" if "again" in others[:-1] else cause)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
