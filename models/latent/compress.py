"""Trains latents that replace a passage, and measures how much of it they keep."""

# B batch, L positions, D width

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from contract import IGNORE, Batch, Carry, Context, Metric, Objective, Prediction, StepOut
from models.latent.prefix import Prefix


class Compress(Objective):
    """Sums the cross entropy of the tokens after a passage that the model sees as latents alone.

    `share` is the part of the passage's worth that latents keep: 0 where they are worth no more
    than no passage, 1 where they are worth as much as the whole.
    """

    headline = Metric("share")
    costs = frozenset({"loss", "loss_none", "loss_last", "loss_whole"})
    model: Prefix

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        passage_BL, text_BL, labels_BL = self._cut(batch)
        nats = _nats(self.model(passage_BL, text_BL), labels_BL)
        count = (labels_BL != IGNORE).sum()
        return StepOut(nats, count, {"loss": (nats.detach(), count)})

    def predict(self, batch: Batch) -> Prediction:
        """Scores the text after latents, and after all that could stand in their place. Sets
        without labels, such as a prompt, are not scored.
        """
        if "labels" not in batch:
            return Prediction({})
        passage_BL, text_BL, labels_BL = self._cut(batch)
        embedded_BLD, latents = self.model.net.embed(passage_BL), self.model.latents
        prefixes = {
            "": self.model.encode(passage_BL),
            "_none": embedded_BLD[:, :0],
            "_last": embedded_BLD[:, -latents:],
            "_whole": embedded_BLD,
        }
        nats = {
            way: _nats(self.model.read(prefix, text_BL), labels_BL).double()
            for way, prefix in prefixes.items()
        }
        count, worth = (labels_BL != IGNORE).sum(), nats["_none"] - nats["_whole"]
        metrics = {f"loss{way}": (summed, count) for way, summed in nats.items()}
        for way in ("", "_last"):
            metrics[f"share{way}"] = (nats["_none"] - nats[way], worth)
        return Prediction(metrics)

    def _cut(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the passages, the texts after them, and the labels of these."""
        at = self.model.passage
        return batch["inputs"][:, :at], batch["inputs"][:, at:], batch["labels"][:, at:].long()


def _nats(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    return F.cross_entropy(
        logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORE, reduction="sum"
    )
