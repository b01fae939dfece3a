"""Build a dataset for your own task: a JSON line {"input": GRID, "output": GRID} for each
example. Grids are lists of rows of numbers from 0 to 249, of any shapes up to 30x30.

python -m data.build.grids --train train.jsonl --test test.jsonl --output-dir data/mine

Lines with the same "puzzle": "NAME" are pairs of one puzzle. Nets learn an embedding of it, so each
puzzle of the test needs training pairs. Without names, every line is a puzzle.

python -m data.build.grids --gym n_queens --train 4000 --test 500 --output-dir data/queens

draws instances from a generator of the package reasoning-gym whose questions and answers are grids.
With several generators, the name of each is the puzzle of its instances.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data import gym
from data.build.common import Parser, new_folder, whole, write_puzzles
from data.build.rows import leaks
from data.recursive.arc import BLANK, FIRST, PAD, SIDE, SYMMETRIES
from data.recursive.grids import (
    EXAMPLE,
    GRIDS,
    MOST_SYMBOLS,
    Example,
    Task,
    parsed,
    task_for,
)
from data.recursive.puzzle_files import Metadata, PuzzleSet, PuzzleSplit
from utils.errors import ConfigError, brief, exit_status
from utils.files import read_bytes

SPLITS = ("train", "test", "validation")
SIDES: tuple[Literal["input", "output"], ...] = ("input", "output")

Lines = dict[str, Example]  # by file and line
Puzzles = dict[str, list[Example]]  # the pairs of each, by name, or by file and line


def read(path: Path) -> Lines:
    lines = enumerate(read_bytes(path).splitlines(), 1)
    named = {f"{path}: line {number}": line for number, line in lines if line.strip()}
    examples = {where: parsed(where, line, EXAMPLE) for where, line in named.items()}
    if not examples:
        raise ConfigError(f"{path}: holds no examples; write one a line")
    return examples


def pair_of(generator: Any, entry: gym.Entry) -> tuple[str, dict[str, Any]] | None:
    """Returns the two grids of an instance with their cells as text, if it has them."""
    facts = entry["metadata"]
    given = next((facts[key] for key in ("puzzle", "matrix", "input") if key in facts), None)
    answer = [line.split() for line in str(entry["answer"]).splitlines()]
    try:
        grids = [np.array(grid, str) for grid in (given, answer)]
    except ValueError:  # rows of different lengths
        return None
    sides = [side for grid in grids for side in (grid.ndim, *grid.shape)]
    if (
        min(sides) < 2
        or max(sides) > SIDE
        or not gym.accepts(generator, gym.written(answer), entry)
    ):
        return None
    # instances of one rule, where a generator has many, are pairs of one puzzle
    puzzle = facts.get("task_id", facts["source_dataset"])
    return str(given), {"puzzle": puzzle} | dict(zip(SIDES, grids, strict=True))


def from_gym(options: argparse.Namespace) -> tuple[dict[str, Lines], gym.About]:
    """Draws instances of reasoning-gym, and numbers the symbols in their cells."""
    given = {split: value for split in SPLITS if (value := getattr(options, split))}
    for split, value in given.items():
        if not value.isdecimal():
            raise ConfigError(f"--{split} {value}: give a number, with --gym")
    counts, wanted = {split: int(given[split]) for split in given}, f"two grids up to {SIDE}x{SIDE}"
    settings, drawn = gym.draw(options, counts, wanted, pair_of)
    # a puzzle that is never trained on would have no embedding, and one alone needs no name
    trained = {pair["puzzle"] for _, pair in drawn["train"]}
    found: set[str] = set()
    for split in given:
        drawn[split] = [each for each in drawn[split] if each[1]["puzzle"] in trained]
        found.update(*(pair[side].flat for _, pair in drawn[split] for side in SIDES))
    symbols = sorted(found, key=lambda symbol: (len(symbol), symbol))
    lines: dict[str, Lines] = {}
    for split in given:
        for number, (_, pair) in enumerate(drawn[split], 1):
            for side in SIDES:
                pair[side] = [[*map(symbols.index, row)] for row in pair[side].tolist()]
            if len(trained) == 1:
                del pair["puzzle"]
            where = f"--gym {options.gym}: {split} {number}"
            lines.setdefault(split, {})[where] = parsed(where, json.dumps(pair), EXAMPLE)
    places = {split: [place for place, _ in drawn[split]] for split in given if split != "train"}
    return lines, gym.About(settings, places, symbols)


def by_puzzle(lines: Lines, trained: Collection[str], named: bool, apart: bool = False) -> Puzzles:
    """Sorts the lines of a split by puzzle, or keeps each apart; `trained` are the puzzles of the
    training split.
    """
    puzzles: Puzzles = {}
    for where, example in lines.items():
        if ("puzzle" in example) != named:
            raise ConfigError(
                f"{where}: {'lacks' if named else 'has'} a puzzle, unlike the first training pair;"
                " name it in all lines or in none"
            )
        name = example.get("puzzle", where)
        if named and name not in trained:
            raise ConfigError(
                f"{where}: puzzle={brief(name)} is in no training pair, from which to learn it; add"
                " some"
            )
        puzzles.setdefault(where if apart else name, []).append(example)
    return puzzles


def rows_of(pairs: list[Example], task: Task, turns: int, tables: np.ndarray) -> np.ndarray:
    """Returns inputs and answers (2, images * pairs, cells) of a puzzle's images, one after the
    other: under so many symmetries, and under the symbol maps of each.
    """
    # all images at once: the turned grids, and each under every map of symbols
    turned = np.array([[task.images(pair[side])[:turns] for side in SIDES] for pair in pairs])
    mapped = tables[:, turned]  # (maps, pairs, 2, turns, cells)
    return mapped.transpose(2, 3, 0, 1, 4).reshape(2, -1, turned.shape[-1])


def symbol_maps(count: int, permuted: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Returns the token that each token becomes (1 + count, 256); first, all stay what they are."""
    tables = np.tile(np.arange(256, dtype=np.uint8), (1 + count, 1))
    tokens = np.array(sorted({*permuted}), np.uint8) + FIRST
    tables[1:, tokens] = rng.permuted(np.tile(tokens, (count, 1)), axis=1)
    return tables


def make_split(
    split: str, metadata: Metadata, puzzles: Puzzles, ids: Mapping[str, int], rows: list[np.ndarray]
) -> PuzzleSplit:
    """Makes a group of the images of each puzzle, given with its first id and its rows."""
    # every puzzle has as many images as the first, whose rows tell how many
    pairs = np.array([len(part) for part in puzzles.values()])
    copies = rows[0].shape[1] // pairs[0]
    if BLANK in ids:  # images of a puzzle without a name have none either
        identifiers = np.zeros(len(pairs) * copies, np.int32)
    else:
        first = np.array([ids[part[0].get("puzzle", BLANK)] for part in puzzles.values()], np.int32)
        identifiers = first[:, None] + np.arange(copies, dtype=np.int32)
    inputs, labels = np.concatenate(rows, axis=1)
    puzzle_set = PuzzleSet(
        inputs=inputs,
        labels=labels,
        puzzle_identifiers=identifiers.reshape(-1),
        puzzle_indices=np.cumsum([0, *np.repeat(pairs, copies)]),
        group_indices=np.arange(0, identifiers.size + 1, copies),
    )
    return PuzzleSplit(split, metadata, {"all": puzzle_set})


def build(options: argparse.Namespace) -> str:
    """Makes the dataset, and returns a line about it."""
    if bool(options.num_aug) != bool(options.permute):
        raise ConfigError("--num-aug, --permute: mean nothing alone; give both or neither")
    with new_folder(options.output_dir) as folder:
        # the first training line decides whether puzzles have names
        if options.gym:
            lines, about = from_gym(options)
            (folder / gym.FILE).write_bytes(gym.ABOUT.dump_json(about))
        else:
            files = {split: Path(path) for split in SPLITS if (path := getattr(options, split))}
            lines = {split: read(path) for split, path in files.items()}
        named = "puzzle" in next(iter(lines["train"].values()))
        names = dict.fromkeys(example.get("puzzle", BLANK) for example in lines["train"].values())
        puzzles: dict[str, Puzzles] = {}
        for split in lines:
            puzzles[split] = by_puzzle(lines[split], names, named, apart=bool(options.gym))

        turns, num_aug = len(SYMMETRIES) if options.augment else 1, options.num_aug
        copies = turns * (1 + num_aug)
        ids = {name: 1 + copies * at for at, name in enumerate(names)} if named else {BLANK: 0}

        # the canvas and the vocabulary must hold all splits, and turned grids where rows become
        # columns
        examples = [example for part in lines.values() for example in part.values()]
        grids = [pair[side] for pair in examples for side in SIDES]
        shapes = {(len(grid), len(grid[0])) for grid in grids}
        shapes |= {(columns, rows) for rows, columns in shapes if options.augment}
        symbols = 1 + max([*options.permute, *(max(map(max, grid)) for grid in grids)])
        task = task_for(shapes, symbols, ids)
        metadata = Metadata(
            pad_id=PAD,
            ignore_label_id=PAD,
            blank_identifier_id=0,
            vocab_size=FIRST + symbols,
            seq_len=task.rows * task.columns,
            num_puzzle_identifiers=1 + copies * len(ids) if named else 1,
            sets=("all",),
        )

        # images are made for the training split alone: evaluations ask the puzzles as they are
        rng, splits = np.random.default_rng(options.seed), {}
        for split, part in puzzles.items():
            rows = [
                rows_of(pairs, task, turns, symbol_maps(num_aug, options.permute, rng))
                for pairs in part.values()
            ]
            splits[split] = make_split(split, metadata, part, ids, rows)
            turns, num_aug = 1, 0  # only training puzzles have images, and come first
        write_puzzles(folder, splits, [BLANK, *image_names(ids if named else (), copies)])
        (folder / GRIDS).write_text(json.dumps(asdict(task)))
    # what was made, and which test puzzles are also in the training set
    examples_of = {split: len(made.sets["all"].inputs) for split, made in splits.items()}
    trained = f"{examples_of.pop('train')} training examples of {len(puzzles['train'])} puzzles"
    evaluated = "".join(f", {count} {split} examples" for split, count in examples_of.items())
    size = f"{task.rows}x{task.columns}, {symbols} symbols"
    if options.gym:
        size += f" ({' '.join(about.symbols)})"
    return f"{options.output_dir}: {trained}{evaluated}, {size}{leaks(splits)}"


def image_names(names: Iterable[str], copies: int) -> Iterator[str]:
    """Yields the names of all images of puzzles, each of which is a puzzle with its own id."""
    for name in names:
        yield name
        yield from (f"{name}|||{copy}" for copy in range(1, copies))


def parser() -> argparse.ArgumentParser:
    options = Parser("grids", __doc__)
    for split in SPLITS:
        options.add_argument(
            f"--{split}",
            required=split != "validation",
            metavar="FILE",
            help="with --gym: how many",
        )
    gym.add_options(options, options)
    options.add_argument(
        "--augment", action="store_true", help="training puzzles in all eight turns and reflections"
    )
    options.add_argument(
        "--permute",
        nargs="+",
        type=whole(0, MOST_SYMBOLS - 1),
        default=[],
        metavar="SYMBOL",
        help="symbols that may be exchanged",
    )
    options.add_argument(
        "--num-aug",
        type=whole(0),
        default=0,
        help="images of every training puzzle, turned or not, by permuted symbols",
    )
    options.add_argument("--seed", type=whole(0), default=0)
    return options


def main(arguments: list[str] | None = None) -> int:
    return exit_status(lambda: build(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
