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
        self._nats: list[Tensor] = []

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        self._nats.append(prediction.outputs["nats"][: len(indices)].cpu())

    def rows(self) -> dict[str, Tensor]:
        return {"nats": torch.cat(self._nats)} if self._nats else {}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        table: list[list[Any]] = []
        for number, nats_PN in enumerate(rows["nats"].unbind(1)):
            of_way = dict(zip(WAYS, nats_PN.double().unbind(1), strict=True))
            worth = (of_way["none"] - of_way["whole"]).mean()
            for way, what in WAYS.items():
                share = float((of_way["none"] - of_way[way]).mean() / worth)
                apart_P = (of_way[way] - of_way["latents"]) / worth
                spread = float(Z * apart_P.std() / len(apart_P) ** 0.5)
                nats = float(of_way[way].mean())
                table.append([number, what, nats, share, float(apart_P.mean()), spread])
        keys = self._model.keys
        sizes = [
            f"{bytes_sent(keys.latents, keys.wire, way)} bytes as {way}"
            for way in ("int8", "float16")
        ]
        about = (
            f"{len(rows['nats'])} held-out passages. {keys.latents} latents of {keys.wire} numbers"
            f" take {' or '.join(sizes)}. The last columns say by how much latents keep more, with"
            " the 95 % interval of it."
        )
        columns = ["reader", "in place of the passage", "nats", "share", "latents", "±"]
        data = {"columns": columns, "rows": table, "percent": [3, 4, 5]}
        text = [f"{'reader, in place of the passage':60} {'nats':>8} share  latents better by"]
        text += [
            f"{number} {what:58} {nats:8.2f} {share:5.1%}  {better:5.1%} ± {spread:.1%}"
            for number, what, nats, share, better, spread in table
        ]
        files = scene("shares", "table", "Worth of a passage", about, **data)
        return Report(files=files, text="\n".join(text))
