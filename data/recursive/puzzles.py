"""Puzzles in HRM's format, from disk or generated on the spot, drawn by HRM's rule.

An epoch visits every group of every training set once, picks one of the group's puzzles, and packs
its examples in random order; a puzzle is cut off where the global batch is full, and the next batch
begins with the next group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Annotated, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt, with_config
from typing_extensions import Doc, TypedDict

from contract import IGNORE, Arrays, EvalSet, Evaluator, RunLength, RunSettings, Source, Spec
from data.example_text import ExampleText
from data.order import Order, cut_steps, run_length, shard_rows
from data.recursive.arc_votes import ArcPairs, ArcVotes
from data.recursive.boards import Boards
from data.recursive.maze import MazePaths, cut
from data.recursive.own_puzzle import KEY, Answers, OwnPuzzles
from data.recursive.puzzle_files import PuzzleSplit, sample
from data.recursive.puzzle_pool import Member, Pool, PuzzleRows, max_vocab, open_datasets
from data.recursive.puzzle_text import kind_of, puzzle_text
from data.source import combined_fingerprint
from utils.command.marks import MAY_CHANGE, STRICT, Fraction
from utils.errors import ConfigError, short
from utils.noise import generator

ARC = ("arc", {"name": "arc@ARC"})  # the evaluator, also as TRM's own configuration names it


@with_config(STRICT)
class EmbeddedKeys(TypedDict):
    """Generated Sudoku."""

    size: Literal[4, 6, 9, 16]
    train: PositiveInt
    test: PositiveInt
    blanks: PositiveInt
    num_aug: NonNegativeInt
    seed: NonNegativeInt


class PuzzleSource(Source):
    """Training batches and evaluation sets of one or several puzzle datasets."""

    def __init__(
        self,
        run: RunSettings,
        *,
        data_paths: Sequence[str] | None,
        data_paths_test: Sequence[str] | None,
        embedded: EmbeddedKeys | None,
        evaluators: Sequence[str | Mapping[str, str]] | None,
        puzzle: Annotated[
            str | None,
            MAY_CHANGE,
            Doc("with eval_only: a puzzle of your own, or a file of them, to be answered"),
        ],
        whole_paths_from: Annotated[
            Fraction | None,
            Doc(
                "mazes: paths are cut into pieces, which grow from a few cells to the whole path "
                "until this share of the steps is done"
            ),
        ],
    ) -> None:
        for one in evaluators or ():
            if one not in ARC:
                raise ConfigError(
                    f"evaluators=[{short(one)}]: unknown; use evaluators=[arc] or evaluators=[]"
                )
        train, test = open_datasets(run.data_path, data_paths, data_paths_test, embedded)
        if whole_paths_from is not None and any(
            kind_of_set(member.split, name) != "maze"
            for member in train
            for name in member.split.sets
        ):
            raise ConfigError(
                f"data.whole_paths_from={whole_paths_from}: only mazes have paths; give data_path="
                "<built mazes>, or null"
            )
        self._run, self._whole_paths_from = run, whole_paths_from
        self._rows = PuzzleRows(
            [(member.split, name) for member in train for name in member.split.sets]
        )
        self._pool = Pool(train)
        self._single = bool((self._pool.size == 1).all())
        groups = self._pool.group_first, self._pool.group_size
        self._order = Order(run.seed, len(self._pool.group_first), groups)
        self._steps = cut_steps(
            self._order, self._pool.size, run.global_batch_size, run.epochs, run.eval_interval
        )
        # rows and ids of the last step, which its other shards need too
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None
        self._test = {
            member.prefix + name: (member.split, name)
            for member in test
            for name in member.split.sets
        }
        self._eval_sets: dict[str, EvalSet] = {
            member.prefix + name: PuzzleEvalSet(member, name)
            for member in test
            for name in member.split.sets
        }
        # makes the evaluators that show answers to the user's own puzzles
        self._own: Callable[[], list[Evaluator]] | None = None
        if puzzle is not None:
            if not run.eval_only:
                raise ConfigError(
                    f"{KEY}={short(puzzle)}: a trained model answers it; add eval_only=true and"
                    " checkpoint="
                )
            self._own, example = own_examples(puzzle, train[0].split)
            self._eval_sets = {"puzzle": example}
        self._scorers = {
            key: partial(ArcVotes, pairs)
            for key, of in self._test.items()
            if len(self._eval_sets.get(key, ())) and (pairs := _arc_pairs(evaluators, *of))
        }
        self.spec = Spec(
            vocab_size=max_vocab(train),
            seq_len=train[0].split.metadata.seq_len,
            table_rows=sum(member.split.metadata.num_puzzle_identifiers for member in train),
            fingerprint=combined_fingerprint([member.split.fingerprint for member in train]),
            name=", ".join(
                [run.data_path] if run.data_path is not None else data_paths or ["generated Sudoku"]
            ),
        )

    @cached_property
    def length(self) -> RunLength:
        run = self._run
        return run_length(self._steps, run.global_batch_size, run.max_steps, run.eval_every_steps)

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the rows of one shard of one step."""
        if self._drawn is None or self._drawn[0] != step:
            self._drawn = (step, *self._draw(step))
        _, rows, ids = self._drawn
        inputs, labels = self._rows.read(shard_rows(rows, shard, self._run.shards))
        if self._whole_paths_from is not None:
            done = step / max(1.0, self._whole_paths_from * self.length.total_steps)
            longest = round(5 * self.spec.seq_len ** (min(1.0, done) / 2))  # from 5 to 5 sides
            rng = generator(self._run.seed, "cut", step, shard)
            inputs, labels = cut(inputs, labels, longest, rng)
        return {
            "inputs": inputs,
            "labels": labels,
            "puzzle_identifiers": shard_rows(ids, shard, self._run.shards),
        }

    def eval_sets(self) -> Mapping[str, EvalSet]:
        return self._eval_sets

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        if self._own:
            return self._own()
        first = next((name for name, examples in self._eval_sets.items() if len(examples)), None)
        # one example is enough to see what the model does
        shown = [ExampleText(self._text)] if set_name == first else []
        chosen = [self._scorers[set_name]()] if set_name in self._scorers else []
        kind = kind_of_set(*self._test[set_name])
        boards = [Boards(kind)] if kind else []
        return [*shown, *chosen, *boards, *([MazePaths()] if kind == "maze" else [])]

    def _text(self, example: Arrays, answer: np.ndarray) -> str:
        return puzzle_text(example["inputs"], example["labels"], answer, self.spec.vocab_size)

    def _draw(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows and the puzzle ids of a global batch."""
        puzzles = self._order.visits(*self._steps.span(step))
        ids = self._pool.identifier[puzzles]
        first = self._pool.first[puzzles]
        if self._single:
            return first, ids
        rng = generator(self._run.seed, "pack", step)
        rows, owner = pack(first, self._pool.size[puzzles], self._run.global_batch_size, rng)
        return rows, ids[owner]


def pack(
    first: np.ndarray, size: np.ndarray, batch: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Packs puzzles into a batch. Returns the rows, shuffled within each puzzle, and the puzzle of
    each row. Only as many rows of the last puzzle are drawn as fit.
    """
    whole, left = size[:-1], batch - int(size[:-1].sum())
    owner = np.repeat(np.arange(len(size)), np.append(whole, left))
    inside = owner[: batch - left]
    within = np.arange(batch - left) - np.repeat(np.cumsum(whole) - whole, whole)
    shuffled = np.lexsort((rng.random(batch - left), inside))  # sorts by puzzle, then at random
    # the last puzzle may be much larger than what is left, so it is not shuffled as a whole
    last = first[-1] + rng.choice(size[-1], left, replace=False)
    return np.concatenate([(first[inside] + within)[shuffled], last]), owner


class PuzzleEvalSet:
    """One test set of puzzles."""

    def __init__(self, member: Member, name: str) -> None:
        puzzle_set = member.split.sets[name]
        self._rows = PuzzleRows([(member.split, name)])
        self._metadata = member.split.metadata
        self._indices = puzzle_set.puzzle_indices.astype(np.int64)
        self._identifiers = (
            puzzle_set.puzzle_identifiers.astype(np.int64) + member.id_offset
        ).astype(np.int32)
        self._blank = self._metadata.blank_identifier_id + member.id_offset

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: np.ndarray) -> Arrays:
        inputs, labels = self._rows.read(indices)
        puzzle = np.searchsorted(self._indices, indices, side="right") - 1
        return {"inputs": inputs, "labels": labels, "puzzle_identifiers": self._identifiers[puzzle]}

    def padding(self, rows: int) -> Arrays:
        shape = (rows, self._metadata.seq_len)
        return {
            "inputs": np.full(shape, self._metadata.pad_id, np.int32),
            "labels": np.full(shape, IGNORE, np.int32),
            "puzzle_identifiers": np.full(rows, self._blank, np.int32),
        }


def own_examples(given: str, split: PuzzleSplit) -> tuple[Callable[[], list[Evaluator]], EvalSet]:
    """Returns a function that makes evaluators for the user's own puzzles, and these puzzles as an
    evaluation set. They must be of the kind that the data holds.
    """
    known = split.metadata
    kind = kind_of_set(split, known.sets[0])
    own = OwnPuzzles(given, kind, known.seq_len, known.blank_identifier_id)
    return lambda: [Answers(own), Boards(kind)], own


def _arc_pairs(
    evaluators: Sequence[object] | None, split: PuzzleSplit, name: str
) -> ArcPairs | None:
    """Returns what a vote on a set needs. If the user names no evaluators, ARC is scored, as in
    TRM, where the dataset has the names of its puzzles.
    """
    if evaluators is not None and not evaluators:
        return None
    try:
        return ArcPairs(split, name)
    except ConfigError:
        if evaluators is None:
            return None
        raise


def kind_of_set(split: PuzzleSplit, name: str) -> str:
    """Guesses the kind of puzzles in a set from some of its rows."""
    return kind_of(
        sample(split.sets[name].inputs), sample(split.sets[name].labels), split.metadata.vocab_size
    )
