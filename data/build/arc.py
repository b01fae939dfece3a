"""Build an ARC dataset: every task, and its images under symmetries, colour maps and translations.

python -m data.build.arc --train DATA/arc-agi_training --test DATA/arc-agi_evaluation \
    --output-dir data/arc-aug-1000
python -m data.build.arc --train ARC-AGI-2/data/training ConceptARC/corpus \
    --test ARC-AGI-2/data/evaluation --output-dir data/arc-2

An input is the common beginning of Kaggle's two files, before _challenges.json and _solutions.json,
or a folder with one JSON file for each task, perhaps in subfolders. All pairs of --train are
trained on; of --test those that show a task, while those that ask are the test set. Both may be
given several times. Ids follow the order of the inputs, so that an input that is added last changes
no earlier id.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from data.build.arc_variants import Variants, augmented, rows
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
from data.recursive.arc_tasks import Pair, read_tasks, standing_in_training
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
            "--train, --test: neither is given; name a folder of task files, or the path before"
            " _challenges.json"
        )
    with new_folder(options.output_dir) as folder:
        # augmentations first: ids count the puzzles that are made, which may be fewer than asked
        # for
        tasks = read_tasks(options.inputs)
        groups = []  # the puzzles of each task
        with progress(len(tasks), "task") as bar:
            for task in tasks:
                groups.append(augmented(task, options.num_aug, options.seed))
                bar.update()
        splits = make_splits(groups)
        write_puzzles(folder, splits, names(groups))
        # the tasks as they are, by which other tools score a submission
        tested = {
            task.name: {"train": _plain(task.shown), "test": _plain(task.asked)}
            for task in tasks
            if task.tested
        }
        (folder / TEST_PUZZLES).write_text(json.dumps(tested))
    sizes = ", ".join(
        f"{len(split.sets['all'].inputs):,} {name} examples" for name, split in splits.items()
    )
    puzzles = f"{sum(map(len, groups)):,} puzzles of {len(tasks)} tasks"
    lines = [f"{options.output_dir}: {sizes}, {puzzles}"]
    # what a user should know: tasks too simple for so many augmentations, and leaks from the test
    if fewer := [group for group in groups if len(group) <= options.num_aug]:
        least = min(fewer, key=len)
        lines.append(
            f"{len(fewer)} tasks have fewer than {options.num_aug} different augmentations:"
            f" {_first([group.task.name for group in fewer], 3)}; least {least.task.name}:"
            f" {len(least) - 1}"
        )
    repeated, count, total = standing_in_training(tasks)
    if repeated:
        lines.append(
            f"warning: {count} of {total} test pairs are also in the training set; tasks"
            f" {_first(repeated, 5)}"
        )
    return "\n".join(lines)


def make_splits(groups: list[Variants]) -> dict[str, PuzzleSplit]:
    """Returns the training split, and a test split if anything is tested. Rows are made while they
    are written.
    """
    ids = np.cumsum([1, *map(len, groups)]).tolist()  # the first of each group; 0 is blank
    if ids[-1] > MOST_IDS:
        raise ConfigError(
            f"--num-aug: makes {ids[-1]:,} puzzles, more than {MOST_IDS:,}; give a smaller one"
        )
    # padding is not predicted, so its token is also the label to ignore
    metadata = Metadata(
        pad_id=PAD,
        ignore_label_id=PAD,
        blank_identifier_id=0,
        vocab_size=VOCAB,
        seq_len=CELLS,
        num_puzzle_identifiers=ids[-1],
        sets=("all",),
    )
    numbered = [*zip(groups, ids, strict=False)]
    splits = {"train": _split("train", metadata, numbered)}
    if tested := [(group, first) for group, first in numbered if group.task.tested]:
        splits["test"] = _split("test", metadata, tested)
    return splits


def _split(split: str, metadata: Metadata, numbered: Sequence[tuple[Variants, int]]) -> PuzzleSplit:
    """Describes a split of groups, given with the ids of their first puzzles."""
    training = split == "train"
    # only sizes are needed here, and known before any row is made
    groups = [group for group, _ in numbered]
    sizes = [len(group) for group in groups]
    tasks = [group.task for group in groups]
    pairs = [len(task.training_pairs if training else task.asked) for task in tasks]
    indices = np.concatenate([[0], np.cumsum(np.repeat(pairs, sizes))])  # of all puzzles
    index = np.int32 if indices[-1] < 2**31 else np.int64

    # a thousand augmentations of all tasks are gigabytes, so rows are made while they are written
    def pieces(side: int) -> Iterator[np.ndarray]:
        with progress(len(groups), "task") as bar:
            for group in groups:
                yield from rows(group, side, training)
                bar.update()

    shape = (int(indices[-1]), CELLS)
    inputs, labels = (cast(Any, Pieces(shape, partial(pieces, side))) for side in range(2))
    ids = [np.arange(first, first + len(group), dtype=np.int32) for group, first in numbered]
    puzzle_set = PuzzleSet(
        inputs=inputs,
        labels=labels,
        puzzle_identifiers=np.concatenate(ids),
        puzzle_indices=indices.astype(index),
        group_indices=np.cumsum([0, *sizes]).astype(index),
    )
    return PuzzleSplit(split, metadata, {"all": puzzle_set})


def names(groups: list[Variants]) -> list[str]:
    """Returns the name of each id, as TRM's builder writes it."""
    names_by_id = [BLANK]
    for group in groups:
        name = group.task.name
        names_by_id.append(name)
        for symmetry, colours in zip(group.symmetry[1:], group.colours[1:].tolist(), strict=True):
            names_by_id.append(f"{name}|||t{symmetry}|||{''.join(map(str, colours))}")
    return names_by_id


def _plain(pairs: list[Pair]) -> list[dict[str, Any]]:
    return [{"input": grid.tolist(), "output": answer.tolist()} for grid, answer in pairs]


def _first(tasks: list[str], most: int) -> str:
    return ", ".join(tasks[:most]) + (" …" if len(tasks) > most else "")


def parser() -> argparse.ArgumentParser:
    options = Parser("arc", __doc__)
    options.set_defaults(inputs=[])
    options.add_argument(
        "--train", nargs="+", action=Inputs, metavar="INPUT", help="all pairs are trained on"
    )
    options.add_argument(
        "--test",
        nargs="+",
        action=Inputs,
        metavar="INPUT",
        help="pairs that show a task are trained on, those that ask are the test set",
    )
    options.add_argument(
        "--num-aug", type=whole(0), default=1000, help="augmentations of every task, all different"
    )
    options.add_argument("--seed", type=whole(0), default=42)
    return options


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: build(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
