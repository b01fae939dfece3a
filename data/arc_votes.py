"""What a net makes of ARC's test pairs, by the votes of all augmentations of each puzzle."""

# N examples, K answers that differ

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from data.arc import CELLS, FIRST, SIDE, VOCAB, read_augmentations, sizes, undone
from data.puzzle_files import PuzzleSplit
from data.source import Batch
from utils.errors import ConfigError
from utils.measure.report import Prediction, Report

PASSES = (1, 2, 5, 10, 100, 1000)
ATTEMPTS = 2  # in a submission, for each pair
ONE = 2.0**40  # confidences are added as whole numbers, so that no order of adding them gives another sum
WEIGHTS = np.random.default_rng(2).integers(2**63, size=CELLS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


class ArcPairs:
    """The test pairs of a set, and which of them each example asks for, under which augmentation."""

    def __init__(self, split: PuzzleSplit, name: str) -> None:
        where, puzzles = f"evaluators=[arc]: {split.where}/{name}", split.sets[name]
        if (split.metadata.vocab_size, split.metadata.seq_len) != (VOCAB, CELLS) or split.folder is None:
            raise ConfigError(f"{where} holds no ARC puzzles (vocab_size={VOCAB}, seq_len={CELLS}); use evaluators=[]")
        made = read_augmentations(where, split.folder, puzzles.puzzle_identifiers)
        first, count = puzzles.puzzle_indices[:-1].astype(np.int64), np.diff(puzzles.puzzle_indices)
        originals = np.flatnonzero(made.original)
        if len(originals) != len(made.names) or len({*made.puzzle[originals].tolist()}) < len(originals):
            raise ConfigError(f"{where} has not every puzzle once as it was, unaugmented; build it again with python -m data.build.arc")
        originals = originals[made.puzzle[originals].argsort()]
        if (count != count[originals][made.puzzle]).any():
            raise ConfigError(f"{where} has augmentations with other numbers of examples than their puzzle; build it again")
        self.names, self.augmentations = made.names, made
        self._first = first
        self.ends = np.cumsum(count[originals])  # of each puzzle's pairs
        self._pair = (self.ends - count[originals])[made.puzzle]  # the first that each augmentation asks for
        rows = np.concatenate([np.arange(first[one], first[one] + count[one]) for one in originals])
        labels = puzzles.labels.take(rows, axis=0).astype(np.uint8)
        self.truth = keys(undone(labels, np.zeros(len(rows), int), np.tile(np.arange(10), (len(rows), 1)))[0])

    def asked(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of examples the pair that they ask for, and the augmentation by which they do."""
        made = np.searchsorted(self._first, indices, side="right") - 1
        return self._pair[made] + indices - self._first[made], made


def keys(tokens: np.ndarray) -> np.ndarray:
    """64 bits by which equal grids (N, 900) are known."""
    return (tokens.astype(np.uint64) @ WEIGHTS).view(np.int64)


class ArcVotes:
    """Each pair's answers, each with its votes, their confidence and one copy of it; ranked by votes, then by mean confidence."""

    scalars = tuple(f"{of}pass@{k}" for of in ("", "pair_", "whole_") for k in PASSES)

    def __init__(self, pairs: ArcPairs) -> None:
        self._pairs = pairs
        self._found: dict[tuple[int, int], list] = {}

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        outputs = prediction.outputs
        if not {"answer", "q_halt_logits"} <= outputs.keys():
            return
        pair, made = self._pairs.asked(indices)
        augmentations = self._pairs.augmentations
        answers = outputs["answer"][: len(indices)].clamp(0, VOCAB).to(torch.uint8).cpu().numpy()  # VOCAB is no colour, either
        grids, _, _ = undone(answers, augmentations.symmetry[made], augmentations.colours[made])
        confidence = (outputs["q_halt_logits"][: len(indices)].cpu().double().sigmoid() * ONE).round().long()
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
        grid = torch.from_numpy(np.frombuffer(bytearray().join(grids), np.uint8).reshape(-1, CELLS // 2))
        return {"pair": pair, "key": key, "votes": torch.tensor(votes), "confidence": torch.tensor(confidence), "grid": grid}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        """`pass@k` is the mean over puzzles of the share of their pairs that one of the first k answers solves, as TRM reports it;
        `pair_pass@k` the share of all pairs; `whole_pass@k` that of the puzzles with all pairs solved, as HRM reports it."""
        if not rows:
            return Report()
        pair, key, grid, place = self._ranked({name: tensor.numpy() for name, tensor in rows.items()})
        truth, ends = self._pairs.truth, self._pairs.ends
        found = np.full(len(truth), np.iinfo(np.int64).max)
        right = key == truth[pair]
        found[pair[right]] = place[right]
        metrics: dict[str, float] = {}
        for k in PASSES:
            solved = found < k
            each = [part.mean() for part in np.split(solved, ends[:-1])]
            means = (np.mean(each), solved.mean(), np.mean(np.equal(each, 1)))
            metrics |= {f"{of}pass@{k}": float(mean) for of, mean in zip(("", "pair_", "whole_"), means, strict=True)}
        attempts: list[list] = [[] for _ in truth]
        for row in np.flatnonzero(place < ATTEMPTS):
            attempts[pair[row]].append(plain(grid[row]))
        said = "  ".join(f"pass@{k} {metrics[f'pass@{k}']:.4f}" for k in PASSES)
        text = f"{len(ends)} puzzles, {len(truth)} test pairs: {said}"
        return Report(metrics=metrics, files={"submission.json": json.dumps(self._submission(attempts))}, text=text)

    @staticmethod
    def _ranked(rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All ranks' answers as one: the pair, the key and a copy of each, and its place among those to its pair."""
        order = np.lexsort((rows["key"], rows["pair"]))
        pair, key = rows["pair"][order], rows["key"][order]
        first = np.flatnonzero(np.r_[True, (np.diff(pair) != 0) | (np.diff(key) != 0)])
        votes, confidence = (np.add.reduceat(rows[name][order], first) for name in ("votes", "confidence"))
        pair, key, copy = pair[first], key[first], order[first]
        # equal ones stay in the order of their keys: which rank or batch had one first must not matter
        order = np.lexsort((-(confidence / votes), -votes, pair))
        pair = pair[order]
        begins = np.flatnonzero(np.r_[True, np.diff(pair) != 0])
        place = np.arange(len(pair)) - np.repeat(begins, np.diff(np.r_[begins, len(pair)]))
        return pair, key[order], rows["grid"][copy[order]], place

    def _submission(self, attempts: Sequence[list]) -> dict[str, list[dict[str, list]]]:
        """As Kaggle wants it; where all agree there is but one answer, twice."""
        begins = np.r_[0, self._pairs.ends[:-1]]
        filled = [(grids or [[]]) + (grids or [[]])[:1] * (ATTEMPTS - max(1, len(grids))) for grids in attempts]
        return {
            name: [{f"attempt_{number}": grid for number, grid in enumerate(grids, 1)} for grids in filled[begin:end]]
            for name, begin, end in zip(self._pairs.names, begins, self._pairs.ends, strict=True)
        }


def plain(packed: np.ndarray) -> list[list[int]]:
    """A grid as it is written for people and programs."""
    tokens = np.stack([packed & 15, packed >> 4], 1).reshape(CELLS)
    height, width = (int(side[0]) for side in sizes(tokens[None]))
    return (tokens.reshape(SIDE, SIDE)[:height, :width].astype(int) - FIRST).tolist()
