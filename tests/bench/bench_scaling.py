"""Weak and strong scaling over ranks, next to what the machine's cores allow, and a prediction for
many GPUs.

    python -m tests.bench.bench_scaling --ranks 2 4 --rounds 9 --larger 2

Every rank takes real training steps in turns together with the others and alone, side by side with
them: the second is the bound, because nobody is waited for. One rank's row shows how far the
machine's noise goes. Whoever steps together waits for the slowest: against the slowest of those
that are alone this waiting is left out, and against their CPU time other programs are, too. Weak:
every rank has the batch of one; strong: they share it.

The prediction takes the buckets, and the moments at which they may leave, from a step of one
process, and the time of the ring all-reduce from the links' speed as given; at 2 ranks it is held
against what was measured, by the speed that the backend showed in the same minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import pretrain
from tests.bench.ring import Links, Timeline
from tests.ranks import check_ended_well, run_ranks
from tests.steps import steps_of, trainer_on
from utils.measure import hardware
from utils.ranks import distributed
from utils.ranks.distributed import Dist

SHARDS = 8
BOARDS = [
    "data.embedded.size=9",
    "data.embedded.blanks=50",
    "data.embedded.train=64",
    "data.embedded.num_aug=11",
    "data.embedded.test=8",
]
ENDLESS = ["eval_interval=null", "epochs=null", "max_steps=1000000"]
# (keys, batch of one rank, steps of a turn)
NETS: dict[str, tuple[list[str], int, int]] = {
    "HRM": (["arch=hrm", *BOARDS], 8, 1),
    "TRM": (["arch=trm", "arch.mlp_t=true", "arch.pos_encodings=none", *BOARDS], 8, 1),
    "GPT": (
        ["arch=gpt", "data=tokens", "optim=adamw", "data.seq_len=256", "data.embedded.mebibytes=1"],
        8,
        2,
    ),
    "CNN": (["arch=cnn", "data=digits", "optim=adadelta", "lr=1.0", "weight_decay=0"], 64, 5),
}
SMALL, LARGE = 1 << 8, 1 << 22  # elements
ASKED = "MEASURED"  # the variable that tells a rank what to do


def trainer_for(dist: Dist, folder: str, net: str, share: int, shards: int) -> pretrain.Trainer:
    """A trainer with this many examples and shards per rank."""
    sizes = [f"global_batch_size={share * dist.world_size}", f"shards={shards * dist.world_size}"]
    dtype = f"arch.forward_dtype={hardware.forward_dtype(dist.device)}"
    return trainer_on(
        dist, Path(folder, str(dist.world_size)), *NETS[net][0], *ENDLESS, dtype, *sizes
    )


def turn(dist: Dist, steps: Iterator[Callable[[], None]], number: int) -> tuple[float, float]:
    """Seconds of a step by the clock and of computing, all ranks beginning together."""
    dist.barrier()
    start, computed = time.perf_counter(), time.process_time()
    for _ in range(number):
        next(steps)()
    return (now(dist) - start) / number, (time.process_time() - computed) / number


def now(dist: Dist) -> float:
    """Returns the time when all launched work is done."""
    if dist.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def compared(dist: Dist, net: str, share: int, rounds: int) -> dict[str, Any]:
    """Steps among the others and alone, in turns."""
    number, shards = NETS[net][2], SHARDS // dist.world_size
    with TemporaryDirectory() as ours, TemporaryDirectory() as own:
        together, alone = (
            trainer_for(dist, ours, net, share, shards),
            trainer_for(Dist(device=dist.device), own, net, share, shards),
        )
        many, one = steps_of(together, 10**6), steps_of(alone, 10**6)
        turn(dist, many, 2), turn(dist, one, 1)
        together.sync.take_wait_s()
        rows = []
        for _ in range(rounds):
            mine = [
                *turn(dist, many, number),
                *turn(dist, one, number),
                together.sync.take_wait_s() / number,
            ]
            every = torch.stack(dist.all_gather(torch.tensor(mine, device=dist.device)))
            rows.append(
                [every[:, 0].max().item(), *every[:, 1:].mean(0).tolist(), every[:, 2].max().item()]
            )
        timeline = min((watched(dist, alone, one) for _ in range(2)), key=lambda each: each.step_s)
    step_s, computed_s, alone_s, alone_computed_s, wait_s, _ = (
        statistics.median(column) for column in zip(*rows, strict=True)
    )
    medians = {
        "share": share,
        "step_s": step_s,
        "alone_s": alone_s,
        "wait_s": wait_s,
        "of_computing": alone_computed_s / computed_s,
    }
    for name, column in (("of_bound", 2), ("of_slowest", 5)):
        medians[name] = statistics.median(row[column] / row[0] for row in rows)
    return {**medians, "timeline": asdict(timeline.faster(timeline.step_s / alone_s))}


def watched(dist: Dist, alone: pretrain.Trainer, steps: Iterator[Callable[[], None]]) -> Timeline:
    """A step of one process, and when each buffer may leave."""
    sync: Any = alone.sync
    send, backward, ended, buffers = sync.over_ranks, sync.backward, [], []

    def leaving(buffer: torch.Tensor) -> torch.Tensor:
        buffers.append((now(dist) - start, buffer.nbytes))
        return send(buffer)

    @contextmanager
    def passing(last: bool) -> Iterator[None]:
        with backward(last):
            yield
        ended.append(now(dist) - start)

    sync.over_ranks, sync.backward = leaving, passing
    dist.barrier()
    start = time.perf_counter()
    next(steps)()
    whole = now(dist) - start
    sync.over_ranks, sync.backward = send, backward
    return Timeline(ended[-1], whole, buffers)


def backend_speed(dist: Dist) -> dict[str, float]:
    """Returns the ring's cost model for the messages of two ranks, measured here."""
    seconds = {}
    for size in (SMALL, LARGE):
        data = torch.zeros(size, device=dist.device)
        sending = [partial(dist.all_reduce, data)] * 3
        seconds[size] = statistics.median(
            turn(dist, iter(sending), len(sending))[0] for _ in range(9)
        )
    return {
        "gb_s": 4 * (LARGE - SMALL) / (seconds[LARGE] - seconds[SMALL]) / 1e9,
        "latency_us": seconds[SMALL] / 2 * 1e6,
    }


def one_rank(net: str, rounds: int, larger: int) -> None:
    """Measures as one rank; rank 0 prints JSON."""
    dist = distributed.start()
    hardware.tune()
    batch = NETS[net][1] * larger
    try:
        figures: dict[str, Any] = {"weak": compared(dist, net, batch, rounds)}
        if dist.world_size > 1:
            figures["strong"] = compared(dist, net, batch // dist.world_size, rounds)
        if dist.world_size == 2:
            figures["backend"] = backend_speed(dist)
        if dist.is_main:
            print(json.dumps(figures), flush=True)
    finally:
        distributed.stop()


def measured(net: str, ranks: int, asked: argparse.Namespace) -> dict[str, Any]:
    """In processes of their own."""
    env = {ASKED: f"{net} {asked.rounds} {asked.larger}"}
    return json.loads(
        check_ended_well(run_ranks(ranks, ["-m", "tests.bench.bench_scaling"], 580, env))[
            0
        ].stdout.splitlines()[-1]
    )


def show(
    net: str, ranks: int, kind: str, figures: dict[str, Any], one_s: float, one_share: int
) -> None:
    """A row of the table."""
    rate, single = ranks * figures["share"] / figures["step_s"], one_share / one_s
    milliseconds = " | ".join(f"{1e3 * figures[key]:.1f}" for key in ("step_s", "wait_s"))
    shares = (
        f"{rate / single:.2f} | {figures['of_bound']:.1%} | {figures['of_slowest']:.1%} |"
        f" {figures['of_computing']:.1%}"
    )
    print(
        f"| {net} | {kind} | {ranks} | {figures['share']} | {rate:,.1f} | {shares} |"
        f" {milliseconds} |",
        flush=True,
    )


def checked(net: str, figures: dict[str, Any]) -> None:
    """The model at 2 ranks, beside what was measured."""
    speed = figures["backend"]
    links = Links(speed["gb_s"], speed["gb_s"], speed["latency_us"], 2)
    for kind in ("weak", "strong"):
        line = Timeline(**figures[kind]["timeline"])
        hidden, apart = line.on(2, links), line.on(2, links, overlaps=False)
        print(
            f"| {net} | {kind} | {speed['gb_s']:.2f} GB/s, {speed['latency_us']:.0f} µs |"
            f" {1e3 * hidden:.1f} | {1e3 * apart:.1f} | {1e3 * figures[kind]['step_s']:.1f} |"
            f" {apart / figures[kind]['step_s']:.2f} |"
        )


def predict(lines: dict[str, Timeline], links: Links, times: float) -> None:
    """Weak scaling by the model."""
    counts = [2**power for power in range(10)]
    print(
        "\nA prediction, not measured: ms a step (share of one GPU's speed) on so many GPUs, each"
        f" {times:g} times as fast as one process here, with its batch; {links.within_gb_s:g} GB/s"
        f" within nodes of {links.gpus_per_node}, {links.between_gb_s:g} between them,"
        f" {links.latency_us:g} µs a message"
    )
    print(f"| net | {' | '.join(map(str, counts))} |\n|{'---|' * (len(counts) + 1)}")
    for net, line in lines.items():
        steps = [line.faster(times).on(count, links) for count in counts]
        print(
            f"| {net} |"
            f" {' | '.join(f'{1e3 * step:.3g} ({steps[0] / step:.0%})' for step in steps)} |"
        )


def main() -> None:
    if ASKED in os.environ:
        net, rounds, larger = os.environ[ASKED].split()
        return one_rank(net, int(rounds), int(larger))
    parser = argparse.ArgumentParser()
    parser.add_argument("--nets", nargs="+", default=[*NETS], choices=NETS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="beside 1; up to 8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--larger", type=int, default=1, help="so many times the batch of a rank")
    parser.add_argument("--within", type=float, default=300.0, help="GB/s between GPUs of a node")
    parser.add_argument("--between", type=float, default=50.0, help="GB/s between nodes")
    parser.add_argument("--latency", type=float, default=10.0, help="µs of a message")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument(
        "--times-as-fast",
        type=float,
        nargs="+",
        default=[1.0, 500.0],
        help="a GPU, against one process here",
    )
    asked = parser.parse_args()
    columns = (
        "examples/s | times one rank's | of the bound | of the slowest | by CPU time | ms a step |"
        " all-reduce wait, ms"
    )
    print(f"| net | scaling | ranks | batch of a rank | {columns} |\n|{'---|' * 11}")
    lines, pairs = {}, {}
    for net in asked.nets:
        one = measured(net, 1, asked)["weak"]
        lines[net] = Timeline(**one["timeline"])
        show(net, 1, "", one, one["alone_s"], one["share"])
        for ranks in sorted({*asked.ranks} - {1}):
            figures = measured(net, ranks, asked)
            for kind in ("weak", "strong"):
                show(net, ranks, kind, figures[kind], one["alone_s"], one["share"])
            pairs |= {net: figures} if ranks == 2 else {}
    print(
        "\nThe model at 2 ranks: ms a step if messages travel behind the backward, if after it (as"
        " where cores carry them), as measured"
    )
    print(
        "| net | scaling | all-reduce here | behind | after | measured | after/measured"
        f" |\n|{'---|' * 7}"
    )
    for net, figures in pairs.items():
        checked(net, figures)
    for times in asked.times_as_fast:
        predict(
            lines, Links(asked.within, asked.between, asked.latency, asked.gpus_per_node), times
        )


if __name__ == "__main__":
    main()
