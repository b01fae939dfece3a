"""Build an ARC dataset: every task, and its images under symmetries, colour maps and translations.

python -m data.build.arc --train DATA/arc-agi_training --test DATA/arc-agi_evaluation \
    --output-dir data/arc-aug-1000
python -m data.build.arc --train ARC-AGI-2/data/training ConceptARC/corpus \
    --test ARC-AGI-2/data/evaluation --output-dir data/arc-2

An input is what stands before _challenges.json and _solutions.json, or a folder of one JSON file
per task, in folders or not. All pairs of --train are trained on; of --test those that show a task,
and those that ask are the test set. Both may be given several times. Ids follow the order of the
inputs, so that one added behind changes no earlier id.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from data.build.arc_variants import Variants, rows, variants
from data.build.common import (
    TEST_PUZZLES,
    Parser,
    Pieces,
    new_folder,
    progress,
    whole,
    write_puzzles,
)
from data.recursive.arc import BLANK, CELLS, PAD, VOCAB
from data.recursive.arc_tasks import Pair, Task, read_tasks, standing_in_training
from data.recursive.puzzle_files import MOST_IDS, Metadata, PuzzleSet, PuzzleSplit
from utils.errors import ConfigError, exit_status


class Inputs(argparse.Action):
    """Adds paths to one list of (option, path), whose order is that of the command line."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.inputs = [*namespace.inputs, *((option, value) for value in values)]


def build(options: argparse.Namespace) -> str:
    """Makes the dataset, and returns a few lines about it."""
    if not options.inputs:
        raise ConfigError(
            "--train, --test: neither is given; name a folder of task files, or what comes before"
            " _challenges.json"
        )
    with new_folder(options.output_dir) as folder:
        tasks = read_tasks(options.inputs)
        made = []
        with progress(len(tasks), "task") as bar:
            for task in tasks:
                made.append(variants(task, options.num_aug, options.seed))
                bar.update()
        splits = make_splits(made)
        write_puzzles(folder, splits, names(made))
        tested = {
            task.name: {"train": _plain(task.shown), "test": _plain(task.asked)}
            for task in tasks
            if task.tested
        }
        (folder / TEST_PUZZLES).write_text(json.dumps(tested))
    sizes = ", ".join(
        f"{len(split.sets['all'].inputs):,} {name} examples" for name, split in splits.items()
    )
    lines = [
        f"{options.output_dir}: {sizes}, {sum(map(len, made)):,} puzzles of {len(tasks)} tasks"
    ]
    if fewer := [one for one in made if len(one) <= options.num_aug]:
        least = min(fewer, key=len)
        lines.append(
            f"{len(fewer)} tasks have fewer than {options.num_aug} different augmentations:"
            f" {_some(fewer)}; least {least.task.name}: {len(least) - 1}"
        )
    return "\n".join([*lines, *_leaks(tasks)])


def make_splits(made: list[Variants]) -> dict[str, PuzzleSplit]:
    """Returns the training split, and a test split if anything is tested. Rows are made while they
    are written.
    """
    first = np.cumsum([1, *map(len, made)])
    if first[-1] > MOST_IDS:
        raise ConfigError(
            f"--num-aug: makes {first[-1]:,} puzzles, more than {MOST_IDS:,}; give a smaller one"
        )
    metadata = Metadata(
        pad_id=PAD, ignore_label_id=PAD, blank_identifier_id=0, vocab_size=VOCAB,
        seq_len=CELLS, num_puzzle_identifiers=int(first[-1]), sets=("all",),
    )  # fmt: skip
    puzzles = [*zip(made, first.tolist(), strict=False)]
    splits = {"train": _split("train", metadata, puzzles)}
    if tested := [(one, number) for one, number in puzzles if one.task.tested]:
        splits["test"] = _split("test", metadata, tested)
    return splits


def _split(split: str, metadata: Metadata, part: Sequence[tuple[Variants, int]]) -> PuzzleSplit:
    training = split == "train"
    pairs = np.repeat(
        [len(one.task.training_pairs if training else one.task.asked) for one, _ in part],
        [len(one) for one, _ in part],
    )
    indices = np.concatenate([[0], np.cumsum(pairs)])
    index = np.int32 if indices[-1] < 2**31 else np.int64

    def pieces(side: int) -> Iterator[np.ndarray]:
        with progress(len(part), "task") as bar:
            for one, _ in part:
                yield from rows(one, side, training)
                bar.update()

    shape = (int(indices[-1]), CELLS)
    inputs, labels = (cast(Any, Pieces(shape, partial(pieces, side))) for side in range(2))
    puzzle_set = PuzzleSet(
        inputs=inputs,
        labels=labels,
        puzzle_identifiers=np.concatenate(
            [np.arange(first, first + len(one), dtype=np.int32) for one, first in part]
        ),
        puzzle_indices=indices.astype(index),
        group_indices=np.cumsum([0, *(len(one) for one, _ in part)]).astype(index),
    )
    return PuzzleSplit(split, metadata, {"all": puzzle_set})


def names(made: list[Variants]) -> list[str]:
    """Returns what each id stands for, as TRM's builder writes it."""
    names_by_id = [BLANK]
    for one in made:
        digits = (one.colours + ord("0")).tobytes().decode()
        names_by_id.append(one.task.name)
        names_by_id += [
            f"{one.task.name}|||t{one.symmetry[a]}|||{digits[10 * a : 10 * a + 10]}"
            for a in range(1, len(one))
        ]
    return names_by_id


def _plain(pairs: list[Pair]) -> list[dict[str, Any]]:
    return [{"input": given.tolist(), "output": answer.tolist()} for given, answer in pairs]


def _some(made: list[Variants]) -> str:
    return ", ".join(one.task.name for one in made[:3]) + (" …" if len(made) > 3 else "")


def _leaks(tasks: list[Task]) -> list[str]:
    repeated, count, total = standing_in_training(tasks)
    some = ", ".join(repeated[:5]) + (" …" if len(repeated) > 5 else "")
    return (
        [f"warning: {count} of {total} test pairs stand in the training set, too; tasks {some}"]
        if repeated
        else []
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser("arc", __doc__)
    made.set_defaults(inputs=[])
    made.add_argument(
        "--train", nargs="+", action=Inputs, metavar="INPUT", help="all pairs are trained on"
    )
    made.add_argument(
        "--test",
        nargs="+",
        action=Inputs,
        metavar="INPUT",
        help="what shows a task is trained on, what asks is tested",
    )
    made.add_argument(
        "--num-aug", type=whole(0), default=1000, help="augmentations of every task, all different"
    )
    made.add_argument("--seed", type=whole(0), default=42)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 2 and one line about what is wrong."""
    return exit_status(lambda: build(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
