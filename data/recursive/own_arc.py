"""An ARC task of the user's own, asked under augmentations by which the model knows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from data.recursive.arc import CELLS, PAD, canvases, read_augmentations
from data.recursive.arc_tasks import grid_of, list_of, object_of, read_json
from data.recursive.arc_votes import (
    Counting,
    arc_scene,
    best_answers,
    merge_counts,
    shown_pair,
)
from data.recursive.own_puzzle import KEY
from data.recursive.puzzle_pool import Member
from data.recursive.puzzle_text import columns
from data.source import IGNORE, Arrays
from utils.errors import ConfigError, short
from utils.measure.evaluator import Report


class OwnTask:
    """An evaluation set of all images of each test pair, pair after pair."""

    def __init__(self, given: str, train: Sequence[Member], images: int) -> None:
        """`given` is a task's JSON file, named after the task; outputs may be left out."""
        where, self.name = f"{KEY}={short(given)}", Path(given).stem
        task = object_of(where, read_json(Path(given)))
        for member in train:
            assert member.split.folder is not None, "what is generated is Sudoku"
            ids = np.arange(1, member.split.metadata.num_puzzle_identifiers)
            known = read_augmentations(where, member.split.folder, ids)
            if self.name in known.names:
                break
        else:
            raise ConfigError(
                f"{where}: the model knows tasks by their ids, and not {self.name}; train on data"
                " that python -m data.build.arc has made with it"
            )
        chosen = np.flatnonzero(known.puzzle == known.names.index(self.name))
        chosen = chosen[(~known.original[chosen]).argsort(kind="stable")][:images]
        self.augmentations, self.images = known.only(chosen), len(chosen)
        self._ids = (chosen + 1 + member.id_offset).astype(np.int32)
        self.grids, self.truth = [], []
        for number, pair in enumerate(list_of(where, task, "test"), 1):
            pair = object_of(f"{where}: test pair {number}", pair)
            self.grids.append(grid_of(f"{where}: test pair {number}, input", pair.get("input")))
            truth = pair.get("output")
            if truth is not None:
                truth = grid_of(f"{where}: test pair {number}, output", truth).tolist()
            self.truth.append(truth)
        symmetry, colours = self.augmentations.symmetry, self.augmentations.colours
        self._inputs = np.concatenate([canvases(grid, symmetry, colours) for grid in self.grids])

    def __len__(self) -> int:
        return len(self._inputs)

    def asked(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pair and the augmentation of each example."""
        return np.divmod(indices, self.images)

    def read(self, indices: np.ndarray) -> Arrays:
        return self._batch(self._inputs[indices], self._ids[indices % self.images])

    def padding(self, rows: int) -> Arrays:
        return self._batch(np.full((rows, CELLS), PAD), np.zeros(rows, np.int32))

    def _batch(self, inputs: np.ndarray, ids: np.ndarray) -> Arrays:
        labels = np.full(inputs.shape, IGNORE, np.int32)
        return {"inputs": inputs.astype(np.int32), "labels": labels, "puzzle_identifiers": ids}


class ArcAnswer(Counting):
    """The answer to each pair that most images give, how many do, how sure they are, and whether it
    is right, where that is known.
    """

    scalars = ()

    def __init__(self, task: OwnTask) -> None:
        super().__init__(task)
        self._task = task

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        counted = merge_counts([{name: tensor.numpy() for name, tensor in rows.items()}])
        lines: list[str] = []
        answers, pairs = [], []
        for number, (grid, truth) in enumerate(
            zip(self._task.grids, self._task.truth, strict=True)
        ):
            tried, votes = best_answers(counted, number)
            name, best = f"{self._task.name}, test pair {number + 1}", tried[0]
            answers.append(best["grid"])
            pairs.append(shown_pair(name, grid.tolist(), truth, tried, votes))
            right = truth is None or best["grid"] == truth
            shown = {"puzzle": grid.tolist(), "answer": best["grid"]}
            shown |= {} if right else {"right": truth}
            lines += [
                name,
                *columns({of: ["".join(map(str, row)) for row in shown[of]] for of in shown}),
            ]
            lines += [] if truth is None else ["correct" if right else "wrong"]
            lines.append(
                f"{best['votes']} of {self._task.images} images agree, confidence"
                f" {best['confidence']:.1%}"
            )
        files = {"answer.json": json.dumps({self._task.name: answers}) + "\n", **arc_scene(pairs)}
        return Report(text="\n".join(lines), files=files)
