"""Tries a prediction of each evaluation set before training, on one row of padding."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from contract import IGNORE, Objective, Prediction
from data.stream import to_tensors
from models.objective import judging_metric
from trial.batch import TriedBatch, check_metrics
from utils.errors import ConfigError, full_name, kind_of
from utils.measure.evaluation import metric_key
from utils.transfer import batch_to_device


def try_predictions(
    asked: str | None,
    outputs: Collection[str],
    source: Any,
    objective: Any,
    device: torch.device,
    names_alone: bool,
) -> None:
    """Raises ConfigError if the metric that is `asked` for or one of these outputs does not exist.
    Unless `names_alone`, also if predictions break the contract, or the main metric is not among
    the metrics.
    """
    metric = ""
    if asked or not names_alone:
        metric = judging_metric(objective, asked).removeprefix("-")
    sets = {name: examples for name, examples in source.eval_sets().items() if len(examples)}
    if not sets or not (metric or outputs):
        return
    measured, tensors = {}, set()  # the metrics of each set, and the names of inputs and outputs
    metrics = set()
    objective.eval()
    # compiling for a row of padding would take longer than the trial
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for key, examples in sets.items():
            batch = batch_to_device(to_tensors([examples.padding(1)]), device)
            row = TriedBatch(batch, f"the evaluation set {key}", "predict", "eval_sets")
            prediction = objective.predict(row)
            if not names_alone:
                check_prediction(objective, prediction)
            scalars = [
                name
                for evaluator in (*source.evaluators(key), *objective.evaluators(row))
                for name in evaluator.scalars
            ]
            tensors |= {*row, *prediction.outputs}
            metrics |= {f"eval/{name}" for name in prediction.metrics}
            if names := [*prediction.metrics, *scalars]:
                measured[key] = names
    objective.train()
    metrics |= {
        metric_key(key, measured, name) for key, names in measured.items() for name in names
    }
    if not metrics and not asked:  # sets that are only shown
        metric = ""
    where = "objective_metric"
    if not asked:  # the main metric is a name without `eval/`
        where = f"{type(objective).__name__}.headline"
        metric = metric.removeprefix("eval/")
        metrics = {name.removeprefix("eval/") for name in metrics}
    for key, wanted, known in (
        (where, [metric] if metric else [], metrics),
        ("eval_save_outputs", outputs, tensors),
    ):
        if unknown := [name for name in wanted if name not in known]:
            raise ConfigError(
                f"{key}={unknown[0]}: not known here; choose from {', '.join(sorted(known))}"
            )


def check_prediction(objective: Objective, prediction: Any) -> None:
    """Raises ConfigError unless `predict` returned what its contract says for rows of padding."""
    where = f"{full_name(objective)}.predict"
    if not isinstance(prediction, Prediction):
        raise ConfigError(f"{where}: returns {kind_of(prediction)}; return a Prediction")
    check_metrics(where, prediction.metrics)
    for name, (_, count) in prediction.metrics.items():
        if float(count):
            raise ConfigError(
                f"{where}: metric {name} counts {float(count):g} in a row of padding; do not count"
                f" where `labels` are {IGNORE}, or NaN in floats"
            )
