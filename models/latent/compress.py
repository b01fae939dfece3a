"""Trains latents that replace a passage, and measures how much of it they keep."""

# B batch, L positions, T positions of a text, V vocabulary, M latents, W numbers of a latent,
# N ways

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from typing_extensions import Doc

from contract import (
    IGNORE,
    Batch,
    Carry,
    Context,
    Evaluator,
    Objective,
    Prediction,
    StepOut,
)
from models.language.targets import draw_tokens
from models.latent.encoder import Gist, arrived, sent
from models.latent.prefix import Prefix
from models.latent.shares import Shares
from models.latent.stand_ins import WAYS, nats, scores_after, whole
from utils.errors import ConfigError, LocalError
from utils.ranks.devices import devices_of
from utils.ranks.distributed import Dist

MEASURED = ("latents", "last", "none", "whole")  # whose losses are logged


class Compress(Objective):
    """Sums the cross entropy of texts after passages that every reader sees as latents alone.

    The readers are frozen, so the checkpoint of the lowest loss keeps most of the passages.
    """

    headline = "loss"
    costs = frozenset({"loss", "loss_last", "loss_none", "loss_whole"})
    model: Prefix

    def __init__(
        self,
        model: Prefix,
        text: Annotated[NonNegativeFloat, Doc("cross entropy of the text after the latents")],
        teacher: Annotated[
            NonNegativeFloat,
            Doc("divergence from what the reader predicts after the whole passage"),
        ],
        gist: Annotated[
            NonNegativeFloat, Doc("cross entropy of the passage, predicted from latents alone")
        ],
    ) -> None:
        super().__init__(model)
        self.coefficients = {"text": text, "teacher": teacher, "gist": gist}
        if not any(self.coefficients.values()):
            raise ConfigError(
                "arch.loss.text=0: all losses are 0, and there is nothing to learn; give one"
            )
        # a decoder that trains along, so that latents must also tell the passage itself
        keys = model.keys
        self.gist = None
        if gist:
            self.gist = Gist(
                model.passage_len, model.vocab_size, keys.latents, keys.wire, keys.encoder
            )

    def spread(self, dist: Dist) -> None:
        """Spreads the readers over the rank's devices, of which the first has all that trains."""
        # readers are large and independent, so that several GPUs can share them
        devices = devices_of(dist, self.model.keys.devices)
        with dist.agreed():
            for number, reader in enumerate(self.model.readers):
                reader.to(devices[number % len(devices)])
            for part in (self.model.encoder, self.model.adapters, self.gist):
                if part is not None:
                    part.to(dist.device)

    @property
    def movable(self) -> Sequence[tuple[nn.Module, float]]:
        """The readers, each with its share of a step's operations."""
        trained, frozen = self.model.operations()
        together = trained + sum(frozen)
        return [
            (reader, work / together)
            for reader, work in zip(self.model.readers, frozen, strict=True)
        ]

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        z_BMW = self.model(batch)
        labels = [batch[f"labels_{number}"] for number in range(len(self.model.readers))]
        # predicted tokens of each row, of all readers
        weight_B = torch.stack([(rows != IGNORE).sum(1) for rows in labels]).sum(0)
        sums: dict[str, Tensor] = {}
        # every reader adds its losses; they may lie on different devices
        for number in range(len(labels)):
            for name, summed in self._losses_of(number, batch, z_BMW).items():
                summed = summed.to(z_BMW.device)
                sums[name] = sums[name] + summed if name in sums else summed
        # a mean over the passage, weighted like the text's tokens, so that coefficients compare
        if self.gist is not None:
            passage_BL = batch["passage"].long()
            of_token_BL = F.cross_entropy(self.gist(z_BMW).mT, passage_BL, reduction="none")
            sums["gist"] = (of_token_BL.mean(1) * weight_B).sum()
        weight = weight_B.sum()
        metrics = {name: (summed.detach(), weight) for name, summed in sums.items()}
        metrics["loss"] = metrics.pop("text")
        # a loss whose coefficient is 0 is at most logged
        terms = [factor * sums[name] for name, factor in self.coefficients.items() if factor]
        return StepOut(torch.stack(terms).sum(), weight, metrics)

    def _losses_of(self, number: int, batch: Batch, z_BMW: Tensor) -> dict[str, Tensor]:
        where = self.model.device_of(number)
        passage_BL, text_BT, labels_BT = (
            batch[f"{name}_{number}"].to(where) for name in ("passage", "text", "labels")
        )
        prefix, added = self.model.prefix(number, z_BMW)
        # what the reader predicts from the latents, against the text
        logits_BTV = self.model.logits(number, prefix, text_BT, added)
        losses = {"text": nats(logits_BTV, labels_BT).sum()}
        # and against its own prediction with the passage in front of it: a target for every token
        # of the vocabulary
        if self.coefficients["teacher"]:
            with torch.no_grad():
                wanted_BTV = whole(self.model, number, passage_BL, text_BT).log_softmax(-1)
            found_BTV = logits_BTV.log_softmax(-1)
            apart_BT = (wanted_BTV.exp() * (wanted_BTV - found_BTV)).sum(-1)
            losses["teacher"] = (apart_BT * (labels_BT != IGNORE)).sum()
        return losses

    def predict(self, batch: Batch) -> Prediction:
        """Scores texts after latents, and after the baselines of `stand_ins.py`; or continues
        prompts, if the batch has no texts to score.
        """
        if "labels_0" not in batch:
            return Prediction({}, self.answers(batch))
        # another passage's latents as a control: they should be worth nothing
        others = {name: batch[f"other_{name}"] for name in ("passage", "passage_0")}
        z_BMW, other_BMW = self.model(batch), self.model(others)
        sums: dict[str, Tensor] = {}
        said: dict[str, Tensor] = {}
        rows, count, right = [], z_BMW.new_zeros((), dtype=torch.int64), z_BMW.new_zeros(())
        for number in range(len(self.model.readers)):
            found, said[f"said_{number}"] = scores_after(
                self.model, number, batch, z_BMW, other_BMW
            )
            scores_BN2 = torch.stack([found[way] for way in WAYS], 1).to(z_BMW.device)
            of_way = dict(zip(WAYS, scores_BN2[..., 0].sum(0), strict=True))
            sums = {way: sums.get(way, 0.0) + summed for way, summed in of_way.items()}
            predicted_B = (batch[f"labels_{number}"] != IGNORE).sum(1)
            count, right = count + predicted_B.sum(), right + scores_BN2[:, 0, 1].sum()
            # one row for each reader, with the number of predicted tokens last
            rows.append(torch.cat((scores_BN2.flatten(1), predicted_B[:, None]), 1))
        metrics = {"accuracy": (right, count)} | {
            "loss" if way == "latents" else f"loss_{way}": (sums[way], count) for way in MEASURED
        }
        return Prediction(metrics, {"scores": torch.stack(rows, 1)} | said)

    def answers(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the latents of a passage as they are sent, and every reader's continuation of a
        prompt after them, after nothing and after the passage.
        """
        model, mark = self.model, self.model.mark
        if "numbers" not in batch:
            parts = sent(model.encoded(batch), model.keys.send)
        elif not torch.equal(batch["encoder"][0].cpu(), mark):
            raise LocalError("data.passage: holds latents of another run; give its checkpoint")
        else:
            parts = {name: batch[name] for name in ("numbers", "scales") if name in batch}
        z_BMW, found = arrived(parts, model.dtype), dict[str, Tensor]()
        for number in range(len(model.readers)):
            if (prompt := batch.get(f"prompt_{number}")) is None:
                continue
            length = batch[f"continuation_{number}"].shape[1]
            net, prompt = model.net(number), prompt.to(model.device_of(number))
            nothing = net.embed(prompt[:, :0])
            ways: dict[str, Any] = {"latents": model.prefix(number, z_BMW), "none": (nothing, None)}
            if "passage" in batch:
                passage = batch[f"passage_{number}"].to(prompt.device)
                ways["whole"] = net.embed(passage.clamp_min(0)), None, passage >= 0
            for way, prefix in ways.items():
                draw = torch.Generator().manual_seed(int(batch["sample_seed"][0]))
                text = prompt
                # read anew for each token: texts after a passage are short
                for _ in range(length):
                    logits_BV = model.logits(number, prefix[0], text, *prefix[1:])[:, -1]
                    new = draw_tokens(logits_BV, batch["temperature"], batch["top_k"], draw)
                    text = torch.cat((text, new.to(text)), 1)
                found[f"{way}_{number}"] = text[:, prompt.shape[1] :]
        return found | parts | {"encoder": mark[None]}

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        return [Shares(self.model)] if "labels_0" in row else []
