"""An ARC task that the user has written down, asked under augmentations by which a model knows it,
and what it answers.
"""

# P test pairs, K images of each

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from data.recursive.arc import CELLS, PAD, canvases, read_augmentations
from data.recursive.arc_scene import arc_scene, shown_pair
from data.recursive.arc_tasks import grid_of, list_of, object_of
from data.recursive.arc_votes import ONE, Counting, best_answers, merge_counts, plain, rank_answers
from data.recursive.own_text import read_text
from data.recursive.puzzle_pool import Member
from data.recursive.puzzle_text import columns
from data.source import IGNORE, Arrays
from utils.errors import ConfigError, brief
from utils.measure.evaluator import Report


class OwnTask:
    """The images of all test pairs, a pair's behind each other; as `Counting` asks, which pair and
    augmentation each is.
    """

    def __init__(self, given: str, train: Sequence[Member], images: int) -> None:
        """`given`: a file named after its task, or {"name": {"test": [{"input": [[…]]}]}}; outputs
        may be left out.
        """
        where, text = read_text(given)
        name, pairs = _named_task(where, given, text)
        for member in train:
            assert member.split.folder is not None, "what is generated is Sudoku"
            known = read_augmentations(
                where,
                member.split.folder,
                np.arange(1, member.split.metadata.num_puzzle_identifiers),
            )
            if name in known.names:
                break
        else:
            raise ConfigError(
                f"{where}: the model has learnt no task {brief(name)}, and knows tasks by their ids"
                " alone; train on data that python -m data.build.arc has made with it"
            )
        chosen = np.flatnonzero(known.puzzle == known.names.index(name))
        chosen = chosen[(~known.original[chosen]).argsort(kind="stable")][:images]
        self.augmentations = known.only(chosen)
        self.name, self.images = name, len(chosen)
        self.grids = [
            grid_of(f"{where}: test pair {number}, input", one.get("input"))
            for number, one in enumerate(pairs, 1)
        ]
        self.truth = [
            (
                None
                if one.get("output") is None
                else grid_of(f"{where}: test pair {number}, output", one["output"])
            )
            for number, one in enumerate(pairs, 1)
        ]
        self._ids = (chosen + 1 + member.id_offset).astype(np.int32)
        self._inputs = np.concatenate(
            [
                canvases(grid, self.augmentations.symmetry, self.augmentations.colours)
                for grid in self.grids
            ]
        )

    def __len__(self) -> int:
        return len(self._inputs)

    def asked(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.divmod(indices, self.images)

    def read(self, indices: np.ndarray) -> Arrays:
        inputs = self._inputs[indices].astype(np.int32)
        return {
            "inputs": inputs,
            "labels": np.full_like(inputs, IGNORE),
            "puzzle_identifiers": self._ids[indices % self.images],
        }

    def padding(self, rows: int) -> Arrays:
        inputs = np.full((rows, CELLS), PAD, np.int32)
        return {
            "inputs": inputs,
            "labels": np.full_like(inputs, IGNORE),
            "puzzle_identifiers": np.zeros(rows, np.int32),
        }


class ArcAnswer(Counting):
    """To each pair the answer that most images give, how many do and how sure they are; right or
    wrong where that is known.
    """

    scalars = ()

    def __init__(self, task: OwnTask) -> None:
        super().__init__(task)
        self._task = task

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        counted = merge_counts([{name: tensor.numpy() for name, tensor in rows.items()}])
        pair, key, grid, nth = rank_answers(counted)
        lines: list[str] = []
        answers, shown_pairs = [], []
        for number, (given, truth) in enumerate(
            zip(self._task.grids, self._task.truth, strict=True)
        ):
            best = np.flatnonzero((pair == number) & (nth == 0))[0]
            same = np.flatnonzero((counted["pair"] == number) & (counted["key"] == key[best]))[0]
            votes, answer = int(counted["votes"][same]), plain(grid[best])
            answers.append(answer)
            right = truth is None or answer == truth.tolist()
            name = f"{self._task.name}, test pair {number + 1}"
            known = None if truth is None else truth.tolist()
            tried = best_answers(counted, number)
            shown_pairs.append(shown_pair(name, given.tolist(), known, *tried))
            lines += [name]
            shown = {"puzzle": given.tolist(), "answer": answer} | (
                {} if right or truth is None else {"right": truth.tolist()}
            )
            lines += columns(
                {name: ["".join(map(str, row)) for row in rows] for name, rows in shown.items()}
            )
            lines += [] if truth is None else ["correct" if right else "wrong"]
            lines += [
                f"{votes} of {self._task.images} images agree, confidence"
                f" {counted['confidence'][same] / ONE / votes:.1%}"
            ]
        text = "\n".join(lines)
        return Report(
            text=text,
            files={
                "answer.txt": f"{text}\n",
                "answer.json": json.dumps({self._task.name: answers}) + "\n",
                **arc_scene(shown_pairs),
            },
        )


def _named_task(where: str, given: str, text: str) -> tuple[str, list[dict[str, Any]]]:
    """A task's name and its test pairs."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: cannot be read as JSON ({brief(error)}); give a task file, or what stands"
            " in it"
        ) from None
    name, content = Path(given).stem, object_of(where, parsed)
    if "test" not in content:
        if len(content) != 1:
            raise ConfigError(f"{where}: holds {len(content)} tasks; give a file that holds one")
        ((name, content),) = content.items()
    elif text == given:
        raise ConfigError(f"{where}: does not say which task it is; give a file of the task's name")
    pairs = list_of(where, object_of(where, content), "test")
    return name, [
        object_of(f"{where}: test pair {number}", one) for number, one in enumerate(pairs, 1)
    ]
