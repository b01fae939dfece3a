"""Puzzles in HRM's format, from disk or generated on the spot, drawn by HRM's rule.

An epoch visits every group of every training set once, picks one of the group's puzzles, and packs
its examples in random order; a puzzle is cut off where the global batch is full, and the next batch
begins with the next group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from contract import Arrays, Evaluator, Examples, RunLength, RunSettings, Source, Spec
from data.example_text import ExampleText
from data.gym import FILE, Accepted, Gym, written
from data.order import Order, cut_steps, run_length, shard_rows
from data.recursive.arc_votes import ArcPairs, ArcVotes
from data.recursive.boards import Boards
from data.recursive.grids import task_of
from data.recursive.maze import MazePaths, cut
from data.recursive.own_puzzle import KEY, Answers, OwnPuzzles, split_like
from data.recursive.puzzle_files import sample
from data.recursive.puzzle_pool import EmbeddedKeys, Member, Pool, PuzzleEvalSet, open_datasets
from data.recursive.puzzle_text import kind_of, puzzle_text
from data.recursive.sudoku import reveal
from utils.command.marks import MAY_CHANGE, Fraction, Keys
from utils.errors import ConfigError, short
from utils.noise import generator

ARC = ("arc", {"name": "arc@ARC"})  # the evaluator, also as TRM's own configuration names it


class PuzzleKeys(Keys):
    """The keys of data=puzzles."""

    data_paths: Sequence[str] | None
    """Built datasets, used as one, as the root key `data_paths` says"""

    data_paths_test: Sequence[str] | None
    """Built datasets to evaluate on, as the root key `data_paths_test` says"""

    evaluators: Sequence[str | Mapping[str, str]] | None
    """How answers are scored, as the root key `evaluators` says"""

    embedded: EmbeddedKeys | None

    eval_split: Annotated[Literal["test", "validation"], MAY_CHANGE]
    """The split that evaluations read: test, or validation, which the builder held out of the
    training puzzles by --validation"""

    puzzle: Annotated[str | None, MAY_CHANGE]
    """With eval_only: a puzzle of your own, or a file of them, to be answered"""

    revealed: Fraction
    """Sudoku: in half of the boards of training, up to this share of the blanks is filled in"""

    whole_paths_from: Fraction | None
    """Mazes: paths are cut into pieces, which grow from a few cells to the whole path until this
    share of the steps is done"""


@dataclass(frozen=True)
class PuzzleSpec(Spec):
    """The facts of puzzles for a net."""

    table_rows: int = 0  # the number of puzzle identifiers, each with a row in the sparse table


class PuzzleSource(Source):
    """Training batches and evaluation sets of one or several puzzle datasets."""

    def __init__(self, run: RunSettings, keys: PuzzleKeys) -> None:
        train, test = _opened(run, keys)
        first = train[0].split.metadata
        self._run, self._revealed = run, keys.revealed
        self._whole_paths_from = keys.whole_paths_from

        # what training visits: a puzzle of each group, in steps of whole puzzles
        self._pool = Pool(train)
        groups = self._pool.group_first, self._pool.group_size
        self._order = Order(run.seed, len(self._pool.group_first), groups)
        self._steps = cut_steps(
            self._order, self._pool.size, run.global_batch_size, run.epochs, run.eval_interval
        )
        # rows and ids of the last step, which its other shards need too
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None

        # what evaluations read: puzzles of the user's own, or the test sets
        self._own: OwnPuzzles | None = None
        self._test = {member.name: member for member in test}
        self._eval_sets: dict[str, Examples] = {}
        self._arc_pairs: dict[str, ArcPairs] = {}  # of the sets in which answers to ARC vote
        self._gyms: dict[str, Gym] = {}  # of the sets that reasoning-gym scores
        if keys.puzzle is not None:
            kind, blank = kind_of_set(train[0]), first.blank_identifier_id
            task = task_of(train[0].split)
            self._own = OwnPuzzles(keys.puzzle, kind, first.seq_len, blank, task)
            self._eval_sets["puzzle"] = self._own
        else:
            self._eval_sets |= {name: PuzzleEvalSet(member) for name, member in self._test.items()}
            for name, member in self._test.items():
                if pairs := _arc_pairs(member, keys.evaluators):
                    self._arc_pairs[name] = pairs
                file = (member.split.folder or Path()) / FILE
                if keys.evaluators is None and task_of(member.split) and file.exists():
                    self._gyms[name] = Gym(file, keys.eval_split)

        # a dataset may have several sets, but has one offset
        datasets = {member.id_offset: member.split for member in train}.values()
        self.spec = PuzzleSpec(
            vocab_size=max(split.metadata.vocab_size for split in datasets),
            seq_len=first.seq_len,
            table_rows=sum(split.metadata.num_puzzle_identifiers for split in datasets),
            fingerprint=" ".join(split.fingerprint for split in datasets),
            name=short(keys.puzzle)
            if keys.puzzle is not None
            else run.data_path or ", ".join(keys.data_paths or ["generated Sudoku"]),
        )

    @cached_property
    def length(self) -> RunLength:
        run = self._run
        return run_length(self._steps, run.global_batch_size, run.max_steps, run.eval_every_steps)

    def train_batch(self, step: int, shard: int) -> Arrays:
        # the rows of a step are drawn once, of which each shard reads its own
        if self._drawn is None or self._drawn[0] != step:
            self._drawn = (step, *self._draw(step))
        _, rows, ids = self._drawn
        # by shard, not by rank, so that changes to a puzzle are the same on any number of ranks
        inputs, labels = self._pool.read(shard_rows(rows, shard, self._run.shards))
        if self._revealed:
            rng = generator(self._run.seed, "reveal", step, shard)
            inputs = reveal(inputs, labels, self._revealed, rng)
        if self._whole_paths_from is not None:
            # pieces of paths grow geometrically with the steps done
            done = step / max(1.0, self._whole_paths_from * self.length.total_steps)
            longest = round(5 * self.spec.seq_len ** (min(1.0, done) / 2))  # from 5 to 5 sides
            rng = generator(self._run.seed, "cut", step, shard)
            inputs, labels = cut(inputs, labels, longest, rng)
        return {
            "inputs": inputs,
            "labels": labels,
            "puzzle_identifiers": shard_rows(ids, shard, self._run.shards),
        }

    def _draw(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows and the puzzle ids of a global batch."""
        # the visits of this step, packed into rows; both depend on the seed and the step alone
        puzzles = self._order.visits(*self._steps.span(step))
        first, size = self._pool.first[puzzles], self._pool.size[puzzles]
        rng = generator(self._run.seed, "pack", step)
        rows, owner = pack(first, size, self._run.global_batch_size, rng)
        return rows, self._pool.identifier[puzzles[owner]]

    def eval_sets(self) -> Mapping[str, Examples]:
        return self._eval_sets

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        if self._own:
            return [Answers(self._own), Boards(self._own.kind, self._own.task)]
        chosen: list[Evaluator] = []
        # pictures and scores that fit the set's kind of puzzle
        task = task_of(self._test[set_name].split)
        first = next((name for name, examples in self._eval_sets.items() if len(examples)), None)
        if set_name == first:  # one example is enough to see what the model does
            vocab_size = self.spec.vocab_size

            def text(example: Arrays, answer: np.ndarray) -> str:
                inputs, labels = example["inputs"], example["labels"]
                return puzzle_text(inputs, labels, answer, vocab_size, task)

            chosen.append(ExampleText(text))
        if set_name in self._arc_pairs:
            chosen.append(ArcVotes(self._arc_pairs[set_name]))
        if task and (gym := self._gyms.get(set_name)):
            write = partial(task.cells, symbols=gym.symbols)
            chosen.append(Accepted(gym, "answer", lambda tokens: written(write(tokens))))
        if kind := kind_of_set(self._test[set_name]):
            chosen.append(Boards(kind, task))
        if kind == "maze":
            chosen.append(MazePaths())
        return chosen


def pack(
    first: np.ndarray, size: np.ndarray, batch: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Packs puzzles, given as their first rows and numbers of rows, into a batch. Returns the rows,
    shuffled within each puzzle, and the puzzle of each. Of the last puzzle, only as many rows are
    drawn as fit.
    """
    whole = size[:-1]
    packed = int(whole.sum())  # rows of the puzzles that are whole
    owner = np.repeat(np.arange(len(whole)), whole)
    within = np.arange(packed) - np.repeat(np.cumsum(whole) - whole, whole)
    shuffled = np.lexsort((rng.random(packed), owner))  # sorts by puzzle, then at random
    # the last puzzle may be much larger than what is left, so it is not shuffled as a whole
    last = first[-1] + rng.choice(size[-1], batch - packed, replace=False)
    rows = np.concatenate([(first[owner] + within)[shuffled], last])
    return rows, np.concatenate([owner, np.full(batch - packed, len(whole))])


def _opened(run: RunSettings, keys: PuzzleKeys) -> tuple[list[Member], list[Member]]:
    """Opens the data to train on and to evaluate; refuses keys that mean nothing for its kind."""
    for name in keys.evaluators or ():
        if name not in ARC:
            raise ConfigError(
                f"evaluators=[{short(name)}]: unknown; use evaluators=[arc] or evaluators=[]"
            )
    if keys.puzzle is not None and not run.eval_only:
        raise ConfigError(
            f"{KEY}={short(keys.puzzle)}: a trained model answers it; add eval_only=true"
            " and checkpoint="
        )
    if keys.puzzle is not None and run.data_path and not os.path.exists(run.data_path):
        train, test = [Member(split_like(keys.puzzle), "all")], list[Member]()
    else:
        train, test = open_datasets(
            run.data_path, keys.data_paths, keys.data_paths_test, keys.embedded, keys.eval_split
        )
    kinds = {*map(kind_of_set, train)}
    if keys.revealed and kinds != {"sudoku"}:
        raise ConfigError(
            f"data.revealed={keys.revealed}: only Sudoku boards have blanks to fill in; give"
            " data_path=<built boards>, or 0"
        )
    if keys.whole_paths_from is not None and kinds != {"maze"}:
        raise ConfigError(
            f"data.whole_paths_from={keys.whole_paths_from}: only mazes have paths; give"
            " data_path=<built mazes>, or null"
        )
    return train, test


def _arc_pairs(member: Member, evaluators: Sequence[object] | None) -> ArcPairs | None:
    """Returns what a vote on a set needs. If the user names no evaluators, ARC is scored, as in
    TRM, where the dataset has the names of its puzzles.
    """
    if not len(member.puzzles.inputs) or (evaluators is not None and not evaluators):
        return None
    if evaluators is None and task_of(member.split):
        return None  # its canvas and vocabulary may have ARC's sizes
    try:
        return ArcPairs(member.split, member.set_name)
    except ConfigError:
        if evaluators is None:
            return None
        raise


def kind_of_set(member: Member) -> str:
    """Returns the kind of puzzles in a set; Sudoku and mazes are recognised from some rows."""
    if task_of(member.split):
        return "grid"
    inputs, labels = sample(member.puzzles.inputs), sample(member.puzzles.labels)
    return kind_of(inputs, labels, member.split.metadata.vocab_size)
