"""The table of what stands in the place of a passage: its size, and how much of the passage's worth
it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """

    scalars: Sequence[str] = ()

    def __init__(self, model: Prefix) -> None:
        self._model = model
        self._scores: list[Tensor] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        self._scores.append(prediction.outputs["scores"][: len(indices)].cpu())

    def rows(self) -> dict[str, Tensor]:
        return {"scores": torch.cat(self._scores)} if self._scores else {}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        table: list[list[Any]] = []
        for number, scores in enumerate(rows["scores"].unbind(1)):
            # of each passage and way, nats and tokens that are right; of each passage, all tokens
            scores_PN2, predicted = scores[:, :-1].unflatten(1, (-1, 2)), scores[:, -1].sum()
            of_way = dict(zip(WAYS, scores_PN2[..., 0].unbind(1), strict=True))
            rights = (scores_PN2[..., 1].sum(0) / predicted).tolist()
            worth = (of_way["none"] - of_way["whole"]).mean()
            for (way, what), right in zip(WAYS.items(), rights, strict=True):
                share = float((of_way["none"] - of_way[way]).mean() / worth)
                apart_P = (of_way[way] - of_way["latents"]) / worth
                spread = float(Z * apart_P.std() / len(apart_P) ** 0.5)
                nats = float(of_way[way].mean())
                table.append([number, what, right, nats, share, float(apart_P.mean()), spread])
        keys = self._model.keys
        sizes = [
            f"{bytes_sent(keys.latents, keys.wire, way)} bytes as {way}"
            for way in ("int8", "float16")
        ]
        about = (
            f"{len(rows['scores'])} held-out passages. {keys.latents} latents of {keys.wire}"
            f" numbers take {' or '.join(sizes)}. The last columns say by how much latents keep"
            " more, with the 95 % interval of it."
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
        text = [f"{'reader, in place of the passage':56} right     nats  share  latents better by"]
        for number, what, right, nats, share, better, spread in table:
            kept = f"{right:5.1%} {nats:8.2f} {share:6.1%}  {better:6.1%} ± {spread:.1%}"
            text.append(f"{number} {what:54} {kept}")
        files = scene("shares", "table", "Worth of a passage", about, **data)
        return Report(files=files, text="\n".join(text))
