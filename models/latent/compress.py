"""Trains latents that stand for a text, so that frozen models answer questions about it."""

# B batch, L positions, M latents, W numbers of each, A tokens of an answer, V vocabulary

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.latent import wire
from models.latent.generation import NOTHING, Before, begin_tokens
from models.latent.prefix import BEGIN, Prefix
from models.layers import widen
from models.objective import Batch, Carry, Context, Objective, StepOut
from utils.errors import ConfigError
from utils.latent import ANSWER_INPUTS, CUTS, WIRES
from utils.measure.evaluator import Prediction
from utils.measure.metrics import Metric
from utils.noise import Noise
from utils.ranks.distributed import Dist

USUAL = 64  # texts whose latents are averaged


class Compress(Objective):
    """Each loss is a number for each example, averaged over models, times its coefficient; those
    with a coefficient of 0 cost nothing.
    """

    headline = Metric("exact_match")
    model: Prefix
    usual: Tensor

    def __init__(
        self,
        model: Prefix,
        answer: float,
        first: float,
        first_k: float,
        k: int,
        distill: float,
        temperature: float,
        gist: float,
        align: float,
        scale: float,
        alone: float = 0.0,
        hidden: float = 0.0,
    ) -> None:
        super().__init__(model)
        self.coefficients = {
            "answer": answer,
            "first": first,
            "first_k": first_k,
            "distill": distill,
            "gist": gist,
            "align": align,
            "scale": scale,
        }
        if not any(self.coefficients.values()):
            raise ConfigError(
                "arch.loss.answer=0: all losses are 0, and there is nothing to learn; give one"
            )
        if gist and model.gist is None:
            raise ConfigError(
                f"arch.loss.gist={gist}: asks for texts back, and arch.gist_width=0 makes nothing"
                " that says them; give a width"
            )
        if alone and not gist:
            raise ConfigError(
                f"arch.loss.alone={alone}: is how long the gist alone teaches the encoder, and"
                " arch.loss.gist=0; use alone=0"
            )
        if hidden and not gist:
            raise ConfigError(
                f"arch.loss.hidden={hidden}: is the share of bytes that the gist does without, and"
                " arch.loss.gist=0; use hidden=0"
            )
        self.k, self.temperature, self.alone, self.hidden = k, temperature, alone, hidden
        self.register_buffer("usual", torch.full((USUAL, model.positions), -1, dtype=torch.int32))

    def move_to_devices(self, dist: Dist) -> None:
        """Spreads the frozen models over a rank's devices; what trains is on the first."""
        super().move_to_devices(dist)
        self.model.spread_out(dist)

    def movable(self) -> Sequence[nn.Module]:
        return list(self.model.frozen)

    def prepare(self, dist: Dist, source: Any, noise: Noise) -> None:
        """Keeps some training texts: the mean of their latents is a baseline of evaluations."""
        rows = [
            source.train_batch(step, 0)["context"]
            for step in range(-(-USUAL // len(source.train_batch(0, 0)["context"])))
        ]
        self.usual.copy_(torch.from_numpy(np.concatenate(rows)[:USUAL]))

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        z = self.model.transmit(self.model.encode(batch["context"]))
        asked = (batch["answer_0"] >= 0).any(-1)  # B, Q: of each text so many questions
        z_for_models = z if ctx.progress >= self.alone else z.detach()  # at first, the gist alone
        terms: dict[str, Tensor] = {}
        right = []
        prefixes = []
        for number in range(len(self.model.model_specs)):
            prefix, seen = self.model.adapt(number, z_for_models)
            prefixes.append(prefix)
            answer = batch[f"answer_{number}"].flatten(0, 1)
            logits = self.model.scores(
                number,
                (prefix, seen),
                self._question(batch, number),
                answer,
            )
            right.append(
                ((logits.argmax(-1) == answer) | (answer < 0)).all(1).view(asked.shape) & asked
            )
            for name, term in self._of_one(batch, number, logits, answer).items():
                terms[name] = terms.get(name, 0) + (term.view(asked.shape) * asked).sum(1) / len(
                    self.model.model_specs
                )
            if self.coefficients["scale"]:
                ratio = widen(prefix).square().mean((1, 2)).sqrt() / self.model.sizes[number]
                terms["scale"] = terms.get("scale", 0) + (ratio - 1).square() * asked.sum(1) / len(
                    self.model.model_specs
                )
        if self.coefficients["gist"]:
            terms["gist"] = self._gist(z, batch["context"], ctx.noise) * asked.sum(1)
        if self.coefficients["align"] and len(prefixes) > 1:
            pairs = [wire.alike(*pair) for pair in combinations(prefixes, 2)]
            terms["align"] = torch.stack(pairs).mean(0) * asked.sum(1)
        weight = asked.sum()
        sums = {name: term.sum() for name, term in terms.items()}
        loss = torch.stack([self.coefficients[name] * term for name, term in sums.items()]).sum()
        metrics = {name: (term.detach(), weight) for name, term in sums.items()}
        return StepOut(
            loss,
            weight,
            {**metrics, "exact_match": (torch.stack(right).double().mean(0).sum(), weight)},
        )

    def predict(self, batch: Batch) -> Prediction:
        """Answers from latents, in each way to send them, and from all that these are compared
        with.
        """
        z, other = self.model.encode(batch["context"]), self.model.encode(batch["other"])
        mean = self.model.encode(self.usual).mean(0).expand_as(z)
        counted = (batch["answer_0"] >= 0).any(1)
        outputs: dict[str, Tensor] = {}
        metrics = {}
        exact = []
        latents = {"other": wire.sent(other, self.model.send), "mean": mean} | {
            way: wire.sent(z, way) for way in WIRES
        }
        models = range(len(self.model.model_specs))
        cuts = {way: [self._cut(batch, number, way) for number in models] for way in CUTS}
        for number in models:
            answer = batch[f"answer_{number}"]
            shown = {way: cut[number][0] for way, cut in cuts.items()}
            for way, before, said in self._ways(batch, number, latents, shown):
                outputs[f"answer/{way}/{number}"] = self.model.generate(
                    number, before, said, answer.shape[1]
                ).int()
            made = outputs[f"answer/{self.model.send}/{number}"]
            exact.append(((made == answer) | (answer < 0)).all(1) & counted)
            logits = self.model.scores(
                number,
                self.model.adapt(number, latents[self.model.send]),
                self._question(batch, number),
                answer,
            )
            metrics[f"bits/{number}"] = (
                _surprise(logits, answer).sum() / math.log(2),
                (answer >= 0).sum(),
            )
        metrics["exact_match"] = (torch.stack(exact).double().mean(0).sum(), counted.sum())
        outputs["wire"] = torch.full_like(counted, WIRES.index(self.model.send), dtype=torch.int32)
        return Prediction(metrics, outputs | self._bytes(batch, cuts))

    def _ways(
        self, batch: Batch, number: int, latents: dict[str, Tensor], cuts: dict[str, Tensor]
    ) -> Iterator[tuple[str, Before, Tensor]]:
        """Yields each way to answer: its name, the prefix before the question, and the tokens from
        the begin token to the question's end.
        """
        question, text = self._question(batch, number), batch[f"context_{number}"]
        begin = question[:, :1]
        for way in ANSWER_INPUTS:
            if way in latents:
                yield way, self.model.adapt(number, latents[way]), question
            else:
                shown = cuts | {"text": text, "nothing": text[:, :0]}
                yield way, NOTHING, torch.cat((begin, shown[way], question[:, 1:]), 1)

    def _of_one(
        self, batch: Batch, number: int, logits: Tensor, answer: Tensor
    ) -> dict[str, Tensor]:
        """Returns the loss terms of one model's answers, for each question."""
        wanted, counted = self.coefficients, answer >= 0
        surprise = _surprise(logits, answer)
        terms = {}
        if wanted["answer"]:
            terms["answer"] = _mean(surprise, counted)
        if wanted["first"]:
            terms["first"] = surprise[:, 0]
        if wanted["first_k"]:
            terms["first_k"] = _mean(surprise[:, : self.k], counted[:, : self.k])
        if wanted["distill"]:
            with torch.no_grad():
                question = self._question(batch, number)
                text = batch[f"context_{number}"].repeat_interleave(
                    len(question) // len(batch["context"]), 0
                )
                whole = torch.cat((question[:, :1], text, question[:, 1:]), 1)
                teacher = self.model.scores(number, NOTHING, whole, answer) / self.temperature
            student = (logits / self.temperature).log_softmax(-1)
            apart = F.kl_div(
                student, teacher.log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
            terms["distill"] = _mean(apart * counted, counted) * self.temperature**2
        return terms

    def _gist(self, z: Tensor, context: Tensor, noise: Noise) -> Tensor:
        """Returns the cross entropy of each text's bytes, predicted from its latents.

        With `hidden`, some bytes are hidden from the encoder and not predicted. Each byte must then
        be predictable without its neighbours; otherwise the encoder learns words as symbols and
        mistakes unseen words for seen ones.
        """
        assert self.model.gist is not None
        wanted = context
        if self.hidden:
            gone = noise.uniform("hidden", context.shape) < self.hidden
            z = self.model.transmit(
                self.model.encode(context.masked_fill(gone & (context >= 0), BEGIN))
            )
            wanted = context.masked_fill(gone, -1)
        return _mean(_surprise(widen(self.model.gist(z)), wanted), wanted >= 0)

    def _question(self, batch: Batch, number: int) -> Tensor:
        """Returns the questions about all texts as rows, each after a begin token."""
        question, begin = (
            batch[f"question_{number}"].flatten(0, -2),
            self.model.model_specs[number].begin_token,
        )
        assert begin is not None
        return torch.cat((begin_tokens(begin, question), question), 1)

    def _cut(self, batch: Batch, number: int, way: str) -> tuple[Tensor, Tensor]:
        """A truncated text in a model's tokens, each row of its own length, and its bytes."""
        model, device = self.model, batch["context"].device
        most = {"first": model.places, "cut": model.sent_bytes}[way]
        cut = model.model_specs[number].cuts[way]
        found = [cut(text, most) for text in texts_of(batch["context"])]
        width = max(len(tokens) for tokens, _ in found)
        rows = [[*tokens, *[-1] * (width - len(tokens))] for tokens, _ in found]
        return (
            torch.tensor(rows, dtype=torch.int32).to(device),
            torch.tensor([size for _, size in found]).to(device),
        )

    def _bytes(
        self, batch: Batch, cuts: dict[str, list[tuple[Tensor, Tensor]]]
    ) -> dict[str, Tensor]:
        """The bytes that are read to answer, of each example."""
        model, text = self.model, (batch["context"] >= 0).sum(1)
        fixed = {way: wire.size(model.latents, model.wire, way) for way in WIRES}
        fixed |= {"other": model.sent_bytes, "mean": model.sent_bytes, "nothing": 0}
        found = {way: torch.full_like(text, count) for way, count in fixed.items()}
        found["text"] = text
        for way, cut in cuts.items():
            found[way] = torch.stack([size for _, size in cut]).double().mean(0)
        return {f"bytes/{way}": found[way] for way in ANSWER_INPUTS}


def texts_of(context_BL: Tensor) -> list[bytes]:
    """The texts of which the encoder reads the bytes."""
    return [bytes(byte for byte in row if byte >= 0) for row in context_BL.tolist()]


def _surprise(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of each token; 0 where there is none."""
    costs = F.cross_entropy(
        logits.flatten(0, 1), tokens.clamp_min(0).long().flatten(), reduction="none"
    ).view(tokens.shape)
    return costs * (tokens >= 0)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Returns the mean of each row over the entries that count."""
    return values.sum(1) / counted.sum(1).clamp_min(1)
