"""Answers to ARC's test pairs, by a vote over all augmentations of each puzzle: scored, submitted
and shown on the report page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contract import Batch, Prediction, Report
from data.recursive.arc import CELLS, COLOURS, VOCAB, grid_lines, read_augmentations, undone
from data.recursive.boards import in_turn
from data.recursive.puzzle_files import PuzzleSplit
from utils.errors import ConfigError
from utils.measure.scene import Files, fitting, scene

# N examples, K different answers: an answer to a pair is counted once for each augmentation of its
# puzzle that has it

PASSES = (1, 2, 5, 10, 100, 1000)
LOGGED = (1, 2)  # in the line on every evaluation; 2 is what the contest allows
ATTEMPTS = 2  # in a submission and on the report page, for each pair
SHOWN = 4  # pairs on the report page that one of the answers solves, and as many that none does
CAPTION = (
    "The two answers with the most votes over all augmentations. Pairs are shown in their order."
)
# confidences are added as whole numbers, so that no order of adding them gives another sum
ONE = 2.0**40
# odd numbers, with which no cell's change can vanish from a hash
WEIGHTS = np.random.default_rng(2).integers(2**63, size=CELLS, dtype=np.uint64) * np.uint64(
    2
) + np.uint64(1)

Counted = Mapping[str, np.ndarray]  # (K): pair, key (a hash), votes, confidence, grid (K, 900)


class ArcPairs:
    """The test pairs of a set, and the pair and augmentation of each example."""

    def __init__(self, split: PuzzleSplit, name: str) -> None:
        where, puzzles = f"evaluators=[arc]: {split.where}/{name}", split.sets[name]
        # a vote needs ARC's tokens, and names that say how each puzzle was augmented
        shape = split.metadata.vocab_size, split.metadata.seq_len
        if shape != (VOCAB, CELLS) or split.folder is None:
            raise ConfigError(
                f"{where} holds no ARC puzzles (vocab_size={VOCAB}, seq_len={CELLS}); use"
                " evaluators=[]"
            )
        self.augmentations = read_augmentations(where, split.folder, puzzles.puzzle_identifiers)
        puzzle_of, self.names = self.augmentations.puzzle, self.augmentations.names
        first, count = puzzles.puzzle_indices[:-1].astype(np.int64), np.diff(puzzles.puzzle_indices)

        # every puzzle as it was, in the order of their names
        originals = np.flatnonzero(self.augmentations.original)
        if not len(originals) == len(np.unique(puzzle_of[originals])) == len(self.names):
            raise ConfigError(
                f"{where} does not have each puzzle once without augmentation; build it again with"
                " python -m data.build.arc"
            )
        originals = originals[puzzle_of[originals].argsort()]
        pairs = count[originals]
        if (count != pairs[puzzle_of]).any():
            raise ConfigError(
                f"{where} has augmentations with other numbers of examples than their puzzle; build"
                " it again"
            )
        self.ends = np.cumsum(pairs)  # of each puzzle's pairs
        # the first row and the first pair of each augmentation
        self._first, self._first_pair = first, (self.ends - pairs)[puzzle_of]

        self._puzzles = puzzles
        self._rows = np.concatenate(
            [
                np.arange(first[original], first[original] + count[original])
                for original in originals
            ]
        )
        # right answers in the form in which answers are compared: a hash, with nothing beyond the
        # grid
        labels = puzzles.labels.take(self._rows, axis=0).astype(np.uint8)
        unchanged = np.zeros(len(labels), int), np.tile(np.arange(COLOURS), (len(labels), 1))
        self.truth = keys(undone(labels, *unchanged)[0])  # of each pair

    def asked(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pair and the augmentation of each example."""
        augmentation = np.searchsorted(self._first, indices, side="right") - 1
        within = indices - self._first[augmentation]
        return self._first_pair[augmentation] + within, augmentation

    def shown(self, pair: int) -> dict[str, Any]:
        """Describes a pair for the report page: its name, input and right output."""
        row = self._rows[pair]
        return {
            "name": self.name_of(pair),
            "input": grid_lines(self._puzzles.inputs[row]),
            "truth": grid_lines(self._puzzles.labels[row]),
        }

    def name_of(self, pair: int) -> str:
        """Returns the puzzle's name, with the pair's number if there are several."""
        puzzle = int(np.searchsorted(self.ends, pair, side="right"))
        begin, end = (0, *self.ends)[puzzle], self.ends[puzzle]
        return self.names[puzzle] + (f", pair {pair - begin + 1}" if end - begin > 1 else "")


def keys(tokens: np.ndarray) -> np.ndarray:
    """Hashes grids (N, 900) to 64 bits."""
    return (tokens.astype(np.uint64) @ WEIGHTS).view(np.int64)


class ArcVotes:
    """Undoes the augmentation of answers, counts the votes for each different answer to a pair, and
    ranks all answers to a pair by votes, then by mean confidence.
    """

    scalars = tuple(f"{of}pass@{k}" for of in ("", "pair_", "whole_") for k in PASSES)

    def __init__(self, pairs: ArcPairs) -> None:
        self._pairs = pairs
        # votes, their confidence and the grid, by pair and key
        self._found: dict[tuple[int, int], list[Any]] = {}

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        outputs = prediction.outputs
        if not {"answer", "q_halt_logits"} <= outputs.keys():
            return
        pair, augmentation = self._pairs.asked(indices)
        how = self._pairs.augmentations
        rows = slice(len(indices))  # without padding
        # VOCAB is not a colour, either
        answers = outputs["answer"][rows].clamp(0, VOCAB).to(torch.uint8).cpu().numpy()
        # back to the puzzle as it was, where answers to its augmentations can agree
        grids, _, _ = undone(answers, how.symmetry[augmentation], how.colours[augmentation])
        sure = outputs["q_halt_logits"][rows].cpu().double().sigmoid()
        confidence = (sure * ONE).round().long().tolist()
        # equal answers to a pair have equal hashes, and are counted together
        for row, key in enumerate(zip(pair.tolist(), keys(grids).tolist(), strict=True)):
            found = self._found.setdefault(key, [0, 0, grids[row].copy()])
            found[0] += 1
            found[1] += confidence[row]

    def rows(self) -> dict[str, Tensor]:
        if not self._found:
            return {}
        pair, key = torch.tensor([*self._found]).unbind(1)
        votes, confidence, grids = zip(*self._found.values(), strict=True)
        return {
            "pair": pair,
            "key": key,
            "votes": torch.tensor(votes),
            "confidence": torch.tensor(confidence),
            "grid": torch.from_numpy(np.stack(grids)),
        }

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """Ranks the answers of all ranks.

        `pass@k` is the mean over puzzles of the share of their pairs that one of the first k
        answers solves, as TRM reports it; `pair_pass@k` the share of all pairs; `whole_pass@k` that
        of the puzzles with all pairs solved, as HRM reports it.
        """
        if not rows:
            return Report()
        # metrics for the log, and the votes themselves for other tools and for the page
        ranked = ranked_answers({name: tensor.numpy() for name, tensor in rows.items()})
        metrics = self._metrics(ranked)
        passes = {k: f"pass@{k} {metrics[f'pass@{k}']:.4f}" for k in PASSES}
        counts = f"{len(self._pairs.ends)} puzzles, {len(self._pairs.truth)} test pairs"
        return Report(
            metrics=metrics,
            files={
                "submission.json": json.dumps(self._submission(ranked)),
                "arc_votes.npz": _file(ranked),
                **self._scene(ranked),
            },
            text=f"{counts}: {'  '.join(passes.values())}",
            line="  ".join(passes[k] for k in LOGGED),
        )

    def _metrics(self, ranked: Counted) -> dict[str, float]:
        truth, ends = self._pairs.truth, self._pairs.ends
        # how many answers to each pair come before the right one
        before = np.full(len(truth), np.iinfo(np.int64).max)
        right = ranked["key"] == truth[ranked["pair"]]
        before[ranked["pair"][right]] = ranked["nth"][right]
        metrics: dict[str, float] = {}
        for k in PASSES:
            solved = before < k
            by_puzzle = np.array([pairs.mean() for pairs in np.split(solved, ends[:-1])])
            metrics[f"pass@{k}"] = float(by_puzzle.mean())
            metrics[f"pair_pass@{k}"] = float(solved.mean())
            metrics[f"whole_pass@{k}"] = float((by_puzzle == 1).mean())
        return metrics

    def _submission(self, ranked: Counted) -> dict[str, list[dict[str, list]]]:
        """Returns the first answers to each pair in Kaggle's form."""
        attempts: list[list] = [[] for _ in self._pairs.truth]
        for row in np.flatnonzero(ranked["nth"] < ATTEMPTS):
            lines = grid_lines(ranked["grid"][row])
            attempts[ranked["pair"][row]].append(
                [[int(colour) for colour in line] for line in lines]
            )
        submission = {}
        begin = 0
        for name, end in zip(self._pairs.names, self._pairs.ends.tolist(), strict=True):
            submission[name] = [_attempts(grids) for grids in attempts[begin:end]]
            begin = end
        return submission

    def _scene(self, ranked: Counted) -> Files:
        """Shows some pairs with their best answers on the report page."""
        pair, best = ranked["pair"], ranked["nth"] < ATTEMPTS
        # solved and unsolved pairs in turn, each with its best answers
        right = ranked["key"] == self._pairs.truth[pair]
        asked = np.unique(pair)
        solved = np.isin(asked, pair[best & right])
        shown = []
        for number in asked[in_turn(solved.tolist(), SHOWN)].tolist():
            answers = [
                {
                    "grid": grid_lines(ranked["grid"][row]),
                    "right": bool(right[row]),
                    "votes": int(ranked["votes"][row]),
                    "confidence": float(ranked["confidence"][row] / ONE / ranked["votes"][row]),
                }
                for row in np.flatnonzero((pair == number) & best)
            ]
            # all votes of the pair, against which those of an answer are shown
            votes = int(ranked["votes"][pair == number].sum())
            shown.append({**self._pairs.shown(number), "answers": answers, "votes": votes})
        return fitting(
            shown, lambda some: scene("arc", "arc", "ARC test pairs", CAPTION, pairs=some)
        )


def _attempts(grids: Sequence[list]) -> dict[str, list]:
    """A single answer is given twice; without any, the grids are empty."""
    first = grids[0] if grids else []
    filled = [*grids, *[first] * (ATTEMPTS - len(grids))]
    return {f"attempt_{number}": grid for number, grid in enumerate(filled, 1)}


def _file(ranked: Counted) -> bytes:
    """All answers, the best of each pair first; pairs are numbered as in submission.json, and
    `confidence` is the sum over an answer's votes.
    """
    np.savez_compressed(
        file := BytesIO(),
        pair=ranked["pair"],
        votes=ranked["votes"],
        confidence=ranked["confidence"] / ONE,
        grid=ranked["grid"],
    )
    return file.getvalue()


def ranked_answers(counted: Counted) -> Counted:
    """Adds up what the ranks counted for each answer, and sorts the answers to each pair, the best
    first. Also returns `nth`, how many answers to its pair are better.
    """
    # by pair and key, whichever rank counted them: equally good answers keep this order
    order = np.lexsort((counted["key"], counted["pair"]))
    pair, key = counted["pair"][order], counted["key"][order]
    first = np.flatnonzero(np.r_[True, (np.diff(pair) != 0) | (np.diff(key) != 0)])
    votes = np.add.reduceat(counted["votes"][order], first)
    confidence = np.add.reduceat(counted["confidence"][order], first)
    pair, key, grid = pair[first], key[first], counted["grid"][order[first]]

    # most votes first, then the higher mean confidence
    order = np.lexsort((-(confidence / votes), -votes, pair))
    begins = np.flatnonzero(np.r_[True, np.diff(pair) != 0])
    answers = np.diff(np.r_[begins, len(pair)])  # to each pair
    return {
        "pair": pair[order],
        "key": key[order],
        "votes": votes[order],
        "confidence": confidence[order],
        "grid": grid[order],
        "nth": np.arange(len(pair)) - np.repeat(begins, answers),
    }
