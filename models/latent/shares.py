"""The table of what replaces a passage: its size, and how much of the passage's benefit is kept."""

# P passages, N ways

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contract import Batch, Prediction, Report
from models.latent.encoder import bytes_sent
from models.latent.prefix import Prefix
from models.latent.stand_ins import WAYS
from utils.measure.metrics import Z
from utils.measure.scene import scene


class Shares:
    """Reports, for each reader, the share of every way, and how far latents are from it with the
    95 % interval of the paired difference.

    `share` is the part of the passage's worth that latents keep: 0 where they are worth no more
    than no passage, 1 where they are worth as much as the whole. A reader to which the whole
    passage is not surely worth anything has none.
    """

    def __init__(self, model: Prefix) -> None:
        self._model = model
        self._scores: list[Tensor] = []
        self._indices: list[Tensor] = []
        self.scalars = ["share", *(f"share_{number}" for number in range(len(model.readers)))]

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        self._scores.append(prediction.outputs["scores"][: len(indices)].cpu())
        self._indices.append(torch.from_numpy(indices.copy()))

    def rows(self) -> dict[str, Tensor]:
        if not self._scores:
            return {}
        return {"scores": torch.cat(self._scores), "index": torch.cat(self._indices)}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        table: list[list[Any]] = []
        metrics: dict[str, float] = {}
        gained = whole = 0.0  # of all readers that have a share
        worthless = ""
        # in the order of passages, so that the result does not depend on the number of ranks
        every = rows["scores"][rows["index"].argsort()]
        for number, scores in enumerate(every.unbind(1)):
            # of each passage and way, nats and tokens that are right; of each passage, all tokens
            scores_PN2, predicted = scores[:, :-1].unflatten(1, (-1, 2)), scores[:, -1].sum()
            of_way = dict(zip(WAYS, scores_PN2[..., 0].unbind(1), strict=True))
            rights = (scores_PN2[..., 1].sum(0) / predicted).tolist()
            # the passage's worth: by how much the reader predicts better after it than after
            # nothing
            worth, spread = _mean(of_way["none"] - of_way["whole"])
            if has_share := worth > spread:
                gain = float((of_way["none"] - of_way["latents"]).mean())
                metrics[f"share_{number}"] = gain / worth
                gained, whole = gained + gain, whole + worth
                metrics["share"] = gained / whole
            else:
                worthless += (
                    f" No shares for reader {number}: the whole passage saves it"
                    f" {worth:.2f} ± {spread:.2f} nats."
                )
            # a row for each way, with the paired difference to the latents of the same passages
            for (way, what), right in zip(WAYS.items(), rights, strict=True):
                shares: list[float | None] = [None, None, None]
                if has_share:
                    kept, _ = _mean((of_way["none"] - of_way[way]) / worth)
                    shares = [kept, *_mean((of_way[way] - of_way["latents"]) / worth)]
                table.append([number, what, right, float(of_way[way].mean()), *shares])
        # what was measured, for the page
        keys = self._model.keys
        sizes = [
            f"{bytes_sent(keys.latents, keys.wire, way)} bytes as {way}"
            for way in ("int8", "float16")
        ]
        about = (
            f"{len(every)} held-out passages. {keys.latents} latents of {keys.wire} numbers take"
            f" {' or '.join(sizes)}. The last columns say by how much latents keep more, with the"
            f" 95 % interval of it.{worthless}"
        )
        columns = [
            "reader",
            "in place of the passage",
            "right",
            "nats",
            "share",
            "latents more by",
            "±",
        ]
        data = {"columns": columns, "rows": table, "percent": [2, 4, 5, 6]}
        files = scene("shares", "table", "Worth of a passage", about, **data)
        text = _in_characters(table) + (f"\n{worthless.strip()}" if worthless else "")
        return Report(metrics, files, text)


def _in_characters(table: list[list[Any]]) -> str:
    """Returns the table for the log."""
    lines = [f"{'reader, in place of the passage':56} right     nats  share  latents better by"]
    for number, what, right, nats, *shares in table:
        share, better, within = ("–" if each is None else f"{each:.1%}" for each in shares)
        lines.append(
            f"{number} {what:54} {right:5.1%} {nats:8.2f} {share:>6}  {better:>6} ± {within}"
        )
    return "\n".join(lines)


def _mean(values: Tensor) -> tuple[float, float]:
    """Returns the mean, and how far its 95 % interval reaches to each side."""
    return float(values.mean()), float(Z * values.std() / len(values) ** 0.5)
