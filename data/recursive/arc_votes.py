"""Answers to ARC's test pairs, by a vote over all augmentations of each puzzle: scored, submitted
and shown on the report page.
"""

# N examples, K answers that differ

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contract import Batch, Prediction, Report
from data.recursive.arc import (
    CELLS,
    VOCAB,
    grid_lines,
    read_augmentations,
    undone,
)
from data.recursive.boards import in_turn
from data.recursive.puzzle_files import PuzzleSplit
from utils.errors import ConfigError
from utils.measure.scene import Files, fitting, scene

PASSES = (1, 2, 5, 10, 100, 1000)
LOGGED = (1, 2)  # in the line on every evaluation; 2 is what the contest allows
FILE = "arc_votes.npz"  # all different answers with their votes; pairs as in submission.json
NAMES = ("pair", "key", "votes", "confidence", "grid")
ATTEMPTS = 2  # in a submission and on the report page, for each pair
SHOWN = 4  # pairs on the report page that one of the answers solves, and as many that none does
CAPTION = (
    "The two answers with the most votes over all augmentations. Pairs are shown in their order."
)
# confidences are added as whole numbers, so that no order of adding them gives another sum
ONE = 2.0**40
WEIGHTS = np.random.default_rng(2).integers(2**63, size=CELLS, dtype=np.uint64) * np.uint64(
    2
) + np.uint64(1)


class ArcPairs:
    """The test pairs of a set, and the pair and augmentation of each example."""

    def __init__(self, split: PuzzleSplit, name: str) -> None:
        where, puzzles = f"evaluators=[arc]: {split.where}/{name}", split.sets[name]
        if (split.metadata.vocab_size, split.metadata.seq_len) != (
            VOCAB,
            CELLS,
        ) or split.folder is None:
            raise ConfigError(
                f"{where} holds no ARC puzzles (vocab_size={VOCAB}, seq_len={CELLS}); use"
                " evaluators=[]"
            )
        made = read_augmentations(where, split.folder, puzzles.puzzle_identifiers)
        first, count = puzzles.puzzle_indices[:-1].astype(np.int64), np.diff(puzzles.puzzle_indices)
        originals = np.flatnonzero(made.original)
        if len(originals) != len(made.names) or len({*made.puzzle[originals].tolist()}) < len(
            originals
        ):
            raise ConfigError(
                f"{where} has not every puzzle once as it was, unaugmented; build it again with"
                " python -m data.build.arc"
            )
        originals = originals[made.puzzle[originals].argsort()]
        if (count != count[originals][made.puzzle]).any():
            raise ConfigError(
                f"{where} has augmentations with other numbers of examples than their puzzle; build"
                " it again"
            )
        self.names, self.augmentations = made.names, made
        self._first = first
        self.ends = np.cumsum(count[originals])  # of each puzzle's pairs
        # the first that each augmentation asks for
        self._pair = (self.ends - count[originals])[made.puzzle]
        rows = np.concatenate([np.arange(first[one], first[one] + count[one]) for one in originals])
        self._puzzles, self._rows = puzzles, rows
        labels = puzzles.labels.take(rows, axis=0).astype(np.uint8)
        self.truth = keys(
            undone(labels, np.zeros(len(rows), int), np.tile(np.arange(10), (len(rows), 1)))[0]
        )

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

    def asked(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pair and the augmentation of each example."""
        made = np.searchsorted(self._first, indices, side="right") - 1
        return self._pair[made] + indices - self._first[made], made


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
        self._found: dict[tuple[int, int], list] = {}  # by pair and key

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        outputs = prediction.outputs
        if not {"answer", "q_halt_logits"} <= outputs.keys():
            return
        pair, made = self._pairs.asked(indices)
        augmentations = self._pairs.augmentations
        # VOCAB is no colour, either
        answers = outputs["answer"][: len(indices)].clamp(0, VOCAB).to(torch.uint8).cpu().numpy()
        grids, _, _ = undone(answers, augmentations.symmetry[made], augmentations.colours[made])
        confidence = (
            (outputs["q_halt_logits"][: len(indices)].cpu().double().sigmoid() * ONE).round().long()
        )
        packed = grids[:, ::2] | grids[:, 1::2] << 4
        for row, key in enumerate(zip(pair.tolist(), keys(grids).tolist(), strict=True)):
            if (votes := self._found.get(key)) is None:
                votes = self._found[key] = [0, 0, packed[row].tobytes()]
            votes[0] += 1
            votes[1] += int(confidence[row])

    def rows(self) -> dict[str, Tensor]:
        if not self._found:
            return {}
        pair, key = torch.tensor([*self._found]).unbind(1)
        votes, confidence, grids = zip(*self._found.values(), strict=True)
        grid = torch.from_numpy(
            np.frombuffer(bytearray().join(grids), np.uint8).reshape(-1, CELLS // 2)
        )
        return dict(
            zip(
                NAMES, (pair, key, torch.tensor(votes), torch.tensor(confidence), grid), strict=True
            )
        )

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """`pass@k` is the mean over puzzles of the share of their pairs that one of the first k
        answers solves, as TRM reports it; `pair_pass@k` the share of all pairs; `whole_pass@k` that
        of the puzzles with all pairs solved, as HRM reports it.
        """
        if not rows:
            return Report()
        counted = merge_counts({name: tensor.numpy() for name, tensor in rows.items()})
        metrics, submission = self._judged(counted)
        np.savez_compressed(written := BytesIO(), **counted)  # type: ignore[arg-type]
        files = {"submission.json": submission, FILE: written.getvalue(), **self._scene(counted)}
        said = "  ".join(f"pass@{k} {metrics[f'pass@{k}']:.4f}" for k in PASSES)
        text = f"{len(self._pairs.ends)} puzzles, {len(self._pairs.truth)} test pairs: {said}"
        line = "  ".join(f"pass@{k} {metrics[f'pass@{k}']:.4f}" for k in LOGGED)
        return Report(metrics=metrics, files=files, text=text, line=line)

    def _scene(self, counted: Mapping[str, np.ndarray]) -> Files:
        """Shows some pairs with their best answers on the report page."""
        ranked = rank_answers(counted)
        pair, best = ranked["pair"], ranked["nth"] < ATTEMPTS
        right = ranked["key"] == self._pairs.truth[pair]
        asked = np.unique(pair)
        solved = np.isin(asked, pair[best & right])
        shown = []
        for one in asked[in_turn(solved.tolist(), SHOWN)].tolist():
            answers = [
                {
                    "grid": grid_lines(unpacked(ranked["grid"][row])),
                    "right": bool(right[row]),
                    "votes": int(ranked["votes"][row]),
                    "confidence": float(ranked["confidence"][row] / ONE / ranked["votes"][row]),
                }
                for row in np.flatnonzero((pair == one) & best)
            ]
            votes = int(ranked["votes"][pair == one].sum())
            shown.append({**self._pairs.shown(one), "answers": answers, "votes": votes})
        return fitting(
            shown, lambda some: scene("arc", "arc", "ARC test pairs", CAPTION, pairs=some)
        )

    def _judged(self, counted: Mapping[str, np.ndarray]) -> tuple[dict[str, float], str]:
        """Returns metrics and a submission."""
        ranked = rank_answers(counted)
        pair, nth = ranked["pair"], ranked["nth"]
        truth, ends = self._pairs.truth, self._pairs.ends
        found = np.full(len(truth), np.iinfo(np.int64).max)
        right = ranked["key"] == truth[pair]
        found[pair[right]] = nth[right]
        metrics: dict[str, float] = {}
        for k in PASSES:
            solved = found < k
            each = [part.mean() for part in np.split(solved, ends[:-1])]
            means = (np.mean(each), solved.mean(), np.mean(np.equal(each, 1)))
            metrics |= {
                f"{of}pass@{k}": float(mean)
                for of, mean in zip(("", "pair_", "whole_"), means, strict=True)
            }
        attempts: list[list] = [[] for _ in truth]
        for row in np.flatnonzero(nth < ATTEMPTS):
            lines = grid_lines(unpacked(ranked["grid"][row]))
            attempts[pair[row]].append([[int(colour) for colour in line] for line in lines])
        return metrics, json.dumps(self._submission(attempts))

    def _submission(self, attempts: Sequence[list]) -> dict[str, list[dict[str, list]]]:
        """Returns Kaggle's form, where a single answer stands twice."""
        begins = np.r_[0, self._pairs.ends[:-1]]
        filled = [
            (grids or [[]]) + (grids or [[]])[:1] * (ATTEMPTS - max(1, len(grids)))
            for grids in attempts
        ]
        return {
            name: [
                {f"attempt_{number}": grid for number, grid in enumerate(grids, 1)}
                for grids in filled[begin:end]
            ]
            for name, begin, end in zip(self._pairs.names, begins, self._pairs.ends, strict=True)
        }


def merge_counts(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds up the ranks' counts of each answer. The answers to a pair come in the order of their
    keys, whichever rank counted them.
    """
    order = np.lexsort((rows["key"], rows["pair"]))
    pair, key = rows["pair"][order], rows["key"][order]
    first = np.flatnonzero(np.r_[True, (np.diff(pair) != 0) | (np.diff(key) != 0)])
    votes, confidence = (
        np.add.reduceat(rows[name][order], first) for name in ("votes", "confidence")
    )
    return dict(
        zip(
            NAMES,
            (pair[first], key[first], votes, confidence, rows["grid"][order[first]]),
            strict=True,
        )
    )


def rank_answers(counted: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sorts the answers of each pair, the best first; equal ones keep their order. Also returns
    `nth`, each answer's number within its pair.
    """
    order = np.lexsort(
        (-(counted["confidence"] / counted["votes"]), -counted["votes"], counted["pair"])
    )
    ranked = {name: counted[name][order] for name in NAMES}
    pair = ranked["pair"]
    begins = np.flatnonzero(np.r_[True, np.diff(pair) != 0])
    return ranked | {
        "nth": np.arange(len(pair)) - np.repeat(begins, np.diff(np.r_[begins, len(pair)]))
    }


def unpacked(grid: np.ndarray) -> np.ndarray:
    """Returns the tokens of a grid that was packed by `add`."""
    return np.stack([grid & 15, grid >> 4], 1).reshape(CELLS)
