"""A vote on each puzzle: symmetric images of it are answered, and the answers mapped back."""

# E examples, K images of each, L cells, V tokens

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.recursive.maze import square_symmetries
from data.recursive.sudoku import cell_permutations, digit_permutations
from data.source import IGNORE, Arrays, Batch, EvalSet
from utils.errors import ConfigError
from utils.measure.evaluator import Prediction, Report
from utils.measure.metrics import format_metrics

TOGETHER = 1 << 9  # examples counted at once


@dataclass(frozen=True)
class Symmetries:
    """The source of each cell of an image, and the replacement of each token. The first image is
    the puzzle itself.
    """

    cells_KL: np.ndarray
    tokens_KV: np.ndarray

    def __len__(self) -> int:
        return len(self.cells_KL)

    def image(self, rows: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Returns each row's image by the symmetry of that number."""
        moved = np.take_along_axis(rows, self.cells_KL[which], 1)
        return np.take_along_axis(self.tokens_KV[which], moved, 1)

    def original(self, rows: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Undoes `image`."""
        named = np.take_along_axis(self.tokens_KV.argsort(1)[which], rows, 1)
        return np.take_along_axis(named, self.cells_KL.argsort(1)[which], 1)


def symmetries(kind: str, seq_len: int, vocab_size: int, images: int, seed: int) -> Symmetries:
    """Returns symmetries of a kind of puzzles: drawn at random for Sudoku, all eight for mazes."""
    side, tokens = round(seq_len**0.5), np.tile(np.arange(vocab_size), (images, 1))
    if kind == "sudoku":
        rng = np.random.default_rng([seed, images])
        cells = cell_permutations(side, images, rng)
        tokens[:, 2:] = digit_permutations(side, images, rng)[:, 1:] + 1
        cells[0], tokens[0] = np.arange(seq_len), np.arange(vocab_size)
        return Symmetries(cells.astype(np.int64), tokens)
    if kind != "maze":
        raise ConfigError(
            "evaluators=[vote]: knows the symmetries of Sudoku and of mazes alone; leave vote out"
        )
    if images > 8:
        raise ConfigError(f"data.votes={images}: a maze has 8 images; use at most 8")
    return Symmetries(square_symmetries(side)[:images], tokens)


class VoteSet:
    """All images of every example of a set, example after example, without labels."""

    def __init__(self, examples: EvalSet, symmetric: Symmetries) -> None:
        self.examples, self.symmetric = examples, symmetric

    def __len__(self) -> int:
        return len(self.examples) * len(self.symmetric)

    def read(self, indices: np.ndarray) -> Arrays:
        example, which = np.divmod(indices, len(self.symmetric))
        read = self.examples.read(example)
        inputs = self.symmetric.image(read["inputs"], which).astype(np.int32)
        return read | {"inputs": inputs, "labels": np.full_like(read["labels"], IGNORE)}

    def padding(self, rows: int) -> Arrays:
        return self.examples.padding(rows)


class Votes:
    """The share of examples that a vote solves, weighted by confidence."""

    scalars = ("vote_exact_accuracy",)

    def __init__(self, asked: VoteSet) -> None:
        self._asked = asked
        self._found: list[dict[str, Tensor]] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if "answer" not in prediction.outputs:
            return
        rows = slice(len(indices))
        answers = prediction.outputs["answer"][rows].cpu().numpy()
        original = self._asked.symmetric.original(answers, indices % len(self._asked.symmetric))
        sure = prediction.outputs["q_halt_logits"][rows].cpu().double().sigmoid()
        self._found.append(
            {
                "index": torch.from_numpy(indices.copy()),
                "answer": torch.from_numpy(original).int(),
                "sure": sure,
            }
        )

    def rows(self) -> dict[str, Tensor]:
        return (
            {name: torch.cat([part[name] for part in self._found]) for name in self._found[0]}
            if self._found
            else {}
        )

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        order = rows["index"].argsort()
        images = len(self._asked.symmetric)
        answers_EKL = rows["answer"][order].numpy().reshape(len(self._asked.examples), images, -1)
        sure_EK = rows["sure"][order].numpy().reshape(-1, images)
        solved = among = 0
        for start in range(0, len(answers_EKL), TOGETHER):
            part = slice(start, start + TOGETHER)
            labels_EL = self._asked.examples.read(np.arange(len(answers_EKL))[part])["labels"]
            valid_E = (labels_EL != IGNORE).any(1)
            answer_EL = elect(answers_EKL[part], sure_EK[part])
            right_E = ((answer_EL == labels_EL) | (labels_EL == IGNORE)).all(1)
            among += int(valid_E.sum())
            solved += int((valid_E & right_E).sum())
        if not among:
            return Report()
        metrics = {"vote_exact_accuracy": solved / among}
        return Report(metrics, line=format_metrics(metrics))


def elect(answers_EKL: np.ndarray, sure_EK: np.ndarray) -> np.ndarray:
    """Returns the answer with the largest sum of its images' confidence; the first of equals."""
    alike_EKK = (answers_EKL[:, :, None] == answers_EKL[:, None]).all(-1)
    best_E = (alike_EKK * sure_EK[:, None]).sum(-1).argmax(1)
    return answers_EKL[np.arange(len(best_E)), best_E]
