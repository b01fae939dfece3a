"""Evaluates over all ranks. The results are the same at any number of ranks, and known to all."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from contract import Batch, Evaluator, Prediction, Report
from utils.errors import ConfigError, brief
from utils.files import safe_name
from utils.measure.metrics import format_metrics, means, stack
from utils.ranks import signals
from utils.ranks.distributed import Dist

T = TypeVar("T")
FIRST = "first index"  # a key beside the names of metrics, which have no spaces


class Folder(Protocol):
    """The folder for an evaluation's files."""

    @property
    def directory(self) -> Path: ...

    def say(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...

    def write_evaluation(self, step: int, set_name: str, files: Mapping[str, str | bytes]) -> None:
        """Writes the files of a step and a set, by name."""
        ...


class Means:
    """The means of the objective's metrics. Keeps sums by batch, and adds them in the order of the
    examples.

    Batches are the same at any number of ranks, so the means have the same bits.
    """

    scalars: Sequence[str] = ()  # not known before: all metrics of a prediction
    sums: Tensor  # (metrics, 2), in the order of the sorted names; set by `report`

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self.names: list[str] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if prediction.metrics:  # some sets are only shown
            self.names, self._sums[int(indices[0])] = (
                sorted(prediction.metrics),
                stack(prediction.metrics),
            )

    def rows(self) -> dict[str, Tensor]:
        if not self._sums:
            return {}
        by_metric = torch.stack([*self._sums.values()]).unbind(1)
        return {FIRST: torch.tensor([*self._sums])} | dict(zip(self.names, by_metric, strict=True))

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        self.names = sorted(rows.keys() - {FIRST})
        if not rows:
            self.sums = torch.empty(0, 2)
            return Report()
        self.sums = torch.stack([rows[name] for name in self.names], 1)[rows[FIRST].argsort()].sum(
            0
        )
        return Report(means(self.names, self.sums))


class Evaluation:
    """The evaluation of all sets after a step, over all ranks."""

    def __init__(self, dist: Dist, step: int, folder: Folder, keep: Sequence[str] = ()) -> None:
        """Every rank writes the inputs and outputs named in `keep` to a separate file."""
        self.dist, self.step, self.keep, self._folder = dist, step, keep, folder
        # on rank 0, for the log: means over all sets with the evaluators' lines, and their texts
        self.summary, self.text = "", ""
        self._means: list[Means] = []  # of each set, on rank 0
        self._reports: dict[str, list[Report]] = {}  # by set, of all evaluators, on rank 0

    def run(
        self,
        set_name: str,
        count: int,
        batches: Iterable[tuple[np.ndarray, Batch]],
        predict: Callable[[Batch], Prediction],
        evaluators: Sequence[Evaluator] = (),
    ) -> int:
        """Evaluates one set of `count` examples, given as batches with their indices.

        Called on every rank with equally many batches, because `predict` may talk to other ranks.
        Batches without indices are only padding and are not measured. Returns the signal that cut
        the evaluation short on all ranks, or 0.
        """
        of_objective, kept, done = Means(), [], 0
        measuring = [of_objective, *evaluators]
        told = f"evaluating {set_name}: example"
        self._folder.progress(told, 0, count)
        for indices, batch in batches:
            prediction = predict(batch)
            # All ranks decide together: the others would wait for one that left by itself. Only
            # now, because a prediction may have been cut short.
            if signum := signals.agreed_signal(self.dist.sums(signals.flags)):
                return signum
            check_rows(prediction, len(next(iter(batch.values()))))
            if not len(indices):
                continue
            for evaluator in measuring:
                evaluator.add(indices, batch, prediction)
            if self.keep:
                known = {**batch, **prediction.outputs}  # padding rows come last
                share = {
                    key: known[key][: len(indices)].cpu().contiguous()
                    for key in self.keep
                    if key in known
                }
                kept += [share | {"index": torch.from_numpy(indices.copy())}] if share else []
            # rank 0 prints; ranks take turns, and the last batches may be smaller
            done += len(indices) * self.dist.world_size
            if done < count:
                self._folder.progress(told, done, count)
        if not count:
            return 0
        rows = [self._gather(evaluator.rows()) for evaluator in measuring]
        with self.dist.agreed():
            if self.dist.is_main:
                self._means.append(of_objective)
                self._reports[set_name] = [
                    self._report(evaluator, gathered)
                    for evaluator, gathered in zip(measuring, rows, strict=True)
                ]
        self._save(
            self._folder.directory
            / f"step_{self.step}_{safe_name(set_name)}_preds.{self.dist.rank}.safetensors",
            kept,
        )
        return 0

    def _report(self, evaluator: Evaluator, rows: Mapping[str, Tensor]) -> Report:
        """Returns an evaluator's report. An error ends the run only if the evaluator measures
        something.
        """
        try:
            return evaluator.report(rows)
        except ConfigError:
            raise
        except Exception as error:
            if evaluator.scalars or isinstance(evaluator, Means):
                raise
            kind = type(evaluator).__name__
            self._folder.say(f"step {self.step}: {kind} cannot be shown ({brief(error)})")
            return Report()

    def finish(self) -> dict[str, float]:
        """Returns means over all sets and all metrics of each, on every rank. Rank 0 writes the
        evaluators' files.
        """
        results: dict[str, float] = {}
        with self.dist.agreed():
            if self._means:
                overall = self._overall()
                self.summary = "  ".join([format_metrics(overall), *self._lines()])
                self.text = "\n".join(
                    report.text
                    for reports in self._reports.values()
                    for report in reports
                    if report.text
                )
                results = {f"eval/{name}": value for name, value in overall.items()}
            measured = {
                set_name
                for set_name, reports in self._reports.items()
                if any(report.metrics for report in reports)
            }
            for set_name, reports in self._reports.items():
                metrics = _merge(report.metrics for report in reports)
                results |= {
                    metric_key(set_name, measured, name): float(value)
                    for name, value in metrics.items()
                }
                if files := _merge(report.files for report in reports):
                    self._folder.write_evaluation(self.step, set_name, files)
        # JSON keeps floats exactly, also NaN
        return json.loads(self.dist.broadcast_text(json.dumps(results)))

    def _lines(self) -> list[str]:
        """Returns the evaluators' lines for the summary, with the set's name if several sets have
        lines.
        """
        lines = {
            set_name: "  ".join(report.line for report in reports if report.line)
            for set_name, reports in self._reports.items()
        }
        told = {set_name: line for set_name, line in lines.items() if line}
        return (
            [f"{name}: {line}" for name, line in told.items()]
            if len(told) > 1
            else [*told.values()]
        )

    def _overall(self) -> dict[str, float]:
        """Returns the mean of each metric over the sets that have it."""
        total: dict[str, Tensor] = {}
        for name, sums in (
            (name, sums)
            for one in self._means
            for name, sums in zip(one.names, one.sums, strict=True)
        ):
            total[name] = total[name] + sums if name in total else sums
        names = sorted(total)
        return means(names, torch.stack([total[name] for name in names])) if names else {}

    def _gather(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Concatenates the rows of all ranks on rank 0. A rank without rows does not know their
        names.
        """
        assert len({len(tensor) for tensor in rows.values()}) <= 1, (
            f"rows differ in number: { {k: len(v) for k, v in rows.items()} }"
        )
        every = self.dist.all_gather_text("\n".join(sorted(rows)))
        having = [rank for rank, names in enumerate(every) if names]
        assert len({every[rank] for rank in having}) <= 1, (
            f"ranks {having} have rows of different names: {every}"
        )
        gathered = {}
        for name in every[having[0]].split("\n") if having else ():
            pieces = self.dist.gather(rows.get(name, torch.empty(0)))
            if pieces is not None:
                gathered[name] = torch.cat([pieces[rank] for rank in having])
        return gathered

    def _save(self, path: Path, kept: list[Batch]) -> None:
        """Writes this rank's kept inputs and outputs, with the index of each example. Called on
        every rank.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        problem = ""
        if kept:
            aside = path.with_name(f".{path.name}.writing")
            try:
                # this rank's host may have another disk; rank 0 has made the folder on its
                # disk, where it may be gone by now
                if not self.dist.is_main:
                    path.parent.mkdir(parents=True, exist_ok=True)
                save_file(
                    {key: torch.cat([piece[key] for piece in kept]) for key in kept[0]}, aside
                )
                aside.replace(path)
            except (OSError, SafetensorError) as error:
                aside.unlink(missing_ok=True)
                problem = f"{path.name} cannot be written ({brief(error)}); the run goes on"
        for failure in filter(None, self.dist.all_gather_text(problem) if self.keep else ()):
            self._folder.say(failure)


def metric_key(set_name: str, sets: Collection[str], metric: str) -> str:
    """Returns the name under which a set's metric is logged: with the set's name if several sets
    have metrics.
    """
    return f"eval/{set_name}/{metric}" if len(sets) > 1 else f"eval/{metric}"


def _merge(groups: Iterable[Mapping[str, T]]) -> dict[str, T]:
    merged: dict[str, T] = {}
    for named in groups:
        assert not (twice := merged.keys() & named.keys()), (
            f"two evaluators give the same name: {sorted(twice)}"
        )
        merged |= named
    return merged


def check_rows(prediction: Prediction, size: int) -> None:
    """Raises ConfigError unless every output has a row for each example of a batch."""
    for name, output in prediction.outputs.items():
        if output.shape[:1] != (size,):
            raise ConfigError(
                f"predict: its output {name} has the shape {[*output.shape]} for a batch of {size};"
                " return one row for each example"
            )
