"""Evaluation over all ranks with the same numbers at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from utils.errors import ConfigError, brief
from utils.measure.metrics import Metric, means, stack
from utils.ranks import signals
from utils.ranks.distributed import Dist

Batch = dict[str, Tensor]
ABANDONED = "\n"  # told instead of metric names
Numbered = Iterable[tuple[int, np.ndarray, Batch]]  # batch number, indices of its examples, tensors


class Abandoned(Exception):
    """Somebody asked the run to stop; all ranks leave the evaluation together."""


class Evaluation:
    """What the ranks find out about all sets of examples."""

    def __init__(self, dist: Dist, directory: Path, say: Callable[[str], None], keep: Sequence[str] = ()) -> None:
        self.dist, self.directory, self.keep, self._say = dist, directory, keep, say
        self.first: tuple[Batch, Tensor] | None = None  # the first batch and the answers to it, where it was computed
        self._names: list[str] = []
        self._sums: dict[str, Tensor] = {}

    def run(self, step: int, set_name: str, batches: Numbered, total: int, predict: Callable[[Batch], Any]) -> None:
        """Take in one set of `total` batches; every rank must call it. Raises Abandoned on all of them.

        Each batch's sums keep a row of their own and rows are added in order on every rank: with batch boundaries that
        do not depend on the world size, neither does the result, to the last bit.
        """
        if not total:
            return
        names, rows, kept, stopped = "", {}, [], False
        with self.dist.agreed():
            for number, indices, batch in batches:
                if stopped := bool(signals.asked()):
                    break
                prediction = predict(batch)
                names, rows[number] = " ".join(sorted(prediction.metrics)), stack(prediction.metrics)
                if number == 0 and not self._sums:
                    self.first = batch, prediction.outputs["answer"].cpu()
                if self.keep:
                    known = {**batch, **prediction.outputs}  # padding rows come last
                    share = {key: known[key][: len(indices)].cpu().contiguous() for key in self.keep}
                    kept.append(share | {"index": torch.from_numpy(indices.copy())})
        told = self.dist.all_gather_text(ABANDONED if stopped else names)
        if ABANDONED in told:
            raise Abandoned
        self._names = next(text.split() for text in told if text)  # a rank may have had no batch
        table = torch.zeros(total, len(self._names), 2, dtype=torch.float64, device=self.dist.device)
        for number, row in rows.items():
            table[number] = row
        self.dist.all_reduce(table)
        self._sums[set_name] = table.sum(0)
        self._save(self.directory / f"step_{step}_{file_part(set_name)}_preds.{self.dist.rank}.safetensors", kept)

    def results(self) -> dict[str, float]:
        """Means over all sets, and those of each where there are several."""
        if not self._sums:
            return {}
        total = torch.stack(list(self._sums.values())).sum(0)
        results = {f"eval/{name}": value for name, value in means(self._names, total).items()}
        if len(self._sums) > 1:
            for key, sums in self._sums.items():
                results |= {f"eval/{key}/{name}": value for name, value in means(self._names, sums).items()}
        return results

    def summary(self) -> str:
        """The means over all sets, for people."""
        results = self.results()
        return "  ".join(f"{name} {results[f'eval/{name}']:.4f}" for name in self._names if f"eval/{name}" in results)

    def _save(self, path: Path, kept: list[Batch]) -> None:
        """This rank's share of the kept inputs and outputs, with the index of every example; every rank calls it."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        problem = ""
        if kept:
            aside = path.with_name(f".{path.name}.writing")
            try:
                if not self.dist.is_main:  # whose host may not share the disk; rank 0 has made the folder, and it may be gone since
                    path.parent.mkdir(parents=True, exist_ok=True)
                save_file({key: torch.cat([piece[key] for piece in kept]) for key in kept[0]}, aside)
                aside.replace(path)
            except (OSError, SafetensorError) as error:
                aside.unlink(missing_ok=True)
                problem = f"{path.name} cannot be written ({brief(error)}); the run goes on"
        for said in filter(None, self.dist.all_gather_text(problem) if self.keep else ()):
            self._say(said)


def file_part(set_name: str) -> str:
    """A set's name for a file: of any characters and length (it may begin with a path), and unlike that of every other set."""
    quoted = quote(set_name, safe="", errors="surrogateescape")
    return quoted if len(quoted) <= 150 else f"{quoted[:100]}-{sha256(quoted.encode()).hexdigest()[:16]}"


def check_names(config: Any, eval_sets: Mapping[str, Any], objective: Any, to_batch: Callable[[Any], Batch]) -> None:
    """Metrics and outputs that the configuration names must exist: asked of one empty row, before any training."""
    metric, outputs = Metric.parse(config.objective_metric or "").name, config.eval_save_outputs
    sets = {name: examples for name, examples in eval_sets.items() if len(examples)}
    if not sets or not (metric or outputs):
        return
    row = to_batch(next(iter(sets.values())).padding(1))
    with torch.no_grad():
        prediction = objective.eval().predict(row)
    objective.train()
    metrics = [f"eval/{name}" for name in prediction.metrics]
    if len(sets) > 1:
        metrics += [f"eval/{key}/{name}" for key in sets for name in prediction.metrics]
    known = {"objective_metric": metrics, "eval_save_outputs": [*row, *prediction.outputs]}
    for key, wanted in (("objective_metric", [metric] if metric else []), ("eval_save_outputs", outputs)):
        if unknown := [name for name in wanted if name not in known[key]]:
            raise ConfigError(f"{key}={unknown[0]}: not known here; choose from {', '.join(sorted(known[key]))}")
