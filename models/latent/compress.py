"""Trains latents that stand for a text, so that frozen models answer questions about it."""

# B batch, L positions, M latents, W numbers of each, A tokens of an answer, V vocabulary

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn
from typing_extensions import Doc

from models.latent.generation import NO_PREFIX, LayeredPrefix, begin_tokens
from models.latent.prefix import BEGIN, Prefix, bytes_of, rounded
from models.layers import widen
from models.objective import Batch, Carry, Context, Objective, StepOut
from utils.command.marks import Share
from utils.errors import ConfigError
from utils.latent import ANSWER_INPUTS, CUTS, WIRES
from utils.measure.evaluator import Prediction
from utils.measure.metrics import Metric
from utils.noise import Noise
from utils.ranks.distributed import Dist
from utils.spec import IGNORE

USUAL = 64  # texts whose latents are averaged


class Compress(Objective):
    """Sums the losses of each example, averaged over models and weighted by their coefficients. A
    loss with a coefficient of 0 is not computed.
    """

    headline = Metric("exact_match")
    model: Prefix
    usual: Tensor

    def __init__(
        self,
        model: Prefix,
        answer: Annotated[NonNegativeFloat, Doc("cross entropy of the answer's tokens")],
        gist: Annotated[
            NonNegativeFloat,
            Doc("cross entropy of the text's bytes, predicted from its latents alone"),
        ],
        alone: Annotated[
            Share,
            Doc(
                "share of the run in which only gist trains the encoder, because answers would "
                "pull harder at first"
            ),
        ],
        hidden: Annotated[
            float,
            Field(ge=0, lt=1),
            Doc("share of the text's bytes that gist hides from the encoder and does not ask for"),
        ],
    ) -> None:
        super().__init__(model)
        self.coefficients = {"answer": answer, "gist": gist}
        if not any(self.coefficients.values()):
            raise ConfigError(
                "arch.loss.answer=0: all losses are 0, and there is nothing to learn; give one"
            )
        if (alone or hidden) and not gist:
            raise ConfigError(
                f"arch.loss.gist=0: arch.loss.alone={alone} and arch.loss.hidden={hidden} are for"
                " the gist; give it a coefficient, or use 0 for these two"
            )
        self.alone, self.hidden = alone, hidden
        self.register_buffer(
            "usual", torch.full((USUAL, model.positions), IGNORE, dtype=torch.int32)
        )

    def move_to_devices(self, dist: Dist) -> None:
        """Moves the parts that train to the rank's first device, and spreads the frozen models over
        all of its devices.
        """
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
        is_question = (batch["answer_0"] >= 0).any(-1)  # B, Q: Q questions about each text
        z_for_models = z if ctx.progress >= self.alone else z.detach()  # at first, the gist alone
        correct, costs = [], []
        for number in range(len(self.model.model_specs)):
            answer = batch[f"answer_{number}"].flatten(0, 1)
            logits = self.model.answer_logits(
                number,
                self.model.adapt(number, z_for_models),
                self._prompts(batch, number),
                answer,
            )
            correct.append(
                ((logits.argmax(-1) == answer) | (answer < 0)).all(1).view(is_question.shape)
                & is_question
            )
            cost = _mean(_cross_entropy(logits, answer), answer >= 0).view(is_question.shape)
            costs.append((cost * is_question).sum(1))
        terms: dict[str, Tensor] = {}
        if self.coefficients["answer"]:
            terms["answer"] = sum((cost / len(costs) for cost in costs), torch.zeros_like(costs[0]))
        if self.coefficients["gist"]:
            terms["gist"] = self._gist(z, batch["context"], ctx.noise) * is_question.sum(1)
        weight = is_question.sum()
        sums = {name: term.sum() for name, term in terms.items()}
        loss = torch.stack([self.coefficients[name] * term for name, term in sums.items()]).sum()
        metrics = {name: (term.detach(), weight) for name, term in sums.items()}
        return StepOut(
            loss,
            weight,
            {**metrics, "exact_match": (torch.stack(correct).double().mean(0).sum(), weight)},
        )

    def predict(self, batch: Batch) -> Prediction:
        """Returns answers from latents, in each way to send them, and from every baseline."""
        z, other = self.model.encode(batch["context"]), self.model.encode(batch["other"])
        mean = self.model.encode(self.usual).mean(0).expand_as(z)
        counted = (batch["answer_0"] >= 0).any(1)
        outputs: dict[str, Tensor] = {}
        metrics = {}
        exact = []
        latents = {"other": rounded(other, self.model.send), "mean": mean} | {
            way: rounded(z, way) for way in WIRES
        }
        models = range(len(self.model.model_specs))
        cuts = {way: [self._truncated(batch, number, way) for number in models] for way in CUTS}
        for number in models:
            answer = batch[f"answer_{number}"]
            shown = {way: cut[number][0] for way, cut in cuts.items()}
            for way, before, prompt in self._inputs(batch, number, latents, shown):
                outputs[f"answer/{way}/{number}"] = self.model.generate(
                    number, before, prompt, answer.shape[1]
                ).int()
            generated = outputs[f"answer/{self.model.send}/{number}"]
            exact.append(((generated == answer) | (answer < 0)).all(1) & counted)
            logits = self.model.answer_logits(
                number,
                self.model.adapt(number, latents[self.model.send]),
                self._prompts(batch, number),
                answer,
            )
            metrics[f"bits/{number}"] = (
                _cross_entropy(logits, answer).sum() / math.log(2),
                (answer >= 0).sum(),
            )
        metrics["exact_match"] = (torch.stack(exact).double().mean(0).sum(), counted.sum())
        outputs["wire"] = torch.full_like(counted, WIRES.index(self.model.send), dtype=torch.int32)
        return Prediction(metrics, outputs | self._input_bytes(batch, cuts))

    def _inputs(
        self, batch: Batch, number: int, latents: dict[str, Tensor], cuts: dict[str, Tensor]
    ) -> Iterator[tuple[str, LayeredPrefix, Tensor]]:
        """Yields what a model answers from: its name, the prefix, and the prompt, which goes from
        the begin token to the question's end.
        """
        question, text = self._prompts(batch, number), batch[f"context_{number}"]
        begin = question[:, :1]
        for way in ANSWER_INPUTS:
            if way in latents:
                yield way, self.model.adapt(number, latents[way]), question
            else:
                shown = cuts | {"text": text, "nothing": text[:, :0]}
                yield way, NO_PREFIX, torch.cat((begin, shown[way], question[:, 1:]), 1)

    def _gist(self, z: Tensor, context: Tensor, noise: Noise) -> Tensor:
        """Returns the cross entropy of each text's bytes, predicted from its latents.

        With `hidden`, some bytes are hidden from the encoder and not predicted. Each byte must then
        be predictable without its neighbours; otherwise the encoder learns words as symbols and
        mistakes unseen words for seen ones.
        """
        targets = context
        if self.hidden:
            hidden = noise.uniform("hidden", context.shape) < self.hidden
            z = self.model.transmit(
                self.model.encode(context.masked_fill(hidden & (context >= 0), BEGIN))
            )
            targets = context.masked_fill(hidden, IGNORE)
        return _mean(_cross_entropy(widen(self.model.gist(z)), targets), targets >= 0)

    def _prompts(self, batch: Batch, number: int) -> Tensor:
        """Returns the questions about all texts as rows, each after a begin token."""
        question, begin = (
            batch[f"question_{number}"].flatten(0, -2),
            self.model.model_specs[number].begin_token,
        )
        assert begin is not None
        return torch.cat((begin_tokens(begin, question), question), 1)

    def _truncated(self, batch: Batch, number: int, way: str) -> tuple[Tensor, Tensor]:
        """Returns truncated texts in a model's tokens, padded with IGNORE, and their bytes."""
        model, device = self.model, batch["context"].device
        most = {"first": model.places, "cut": model.sent_bytes}[way]
        cut = model.model_specs[number].cuts[way]
        truncated = [cut(text, most) for text in texts_of(batch["context"])]
        width = max(len(tokens) for tokens, _ in truncated)
        rows = [[*tokens, *[IGNORE] * (width - len(tokens))] for tokens, _ in truncated]
        return (
            torch.tensor(rows, dtype=torch.int32).to(device),
            torch.tensor([size for _, size in truncated]).to(device),
        )

    def _input_bytes(
        self, batch: Batch, cuts: dict[str, list[tuple[Tensor, Tensor]]]
    ) -> dict[str, Tensor]:
        """Returns the size in bytes of what each example is answered from."""
        model, text = self.model, (batch["context"] >= 0).sum(1)
        fixed = {way: bytes_of(model.latents, model.wire, way) for way in WIRES}
        fixed |= {"other": model.sent_bytes, "mean": model.sent_bytes, "nothing": 0}
        sizes = {way: torch.full_like(text, count) for way, count in fixed.items()}
        sizes["text"] = text
        for way, cut in cuts.items():
            sizes[way] = torch.stack([size for _, size in cut]).double().mean(0)
        return {f"bytes/{way}": sizes[way] for way in ANSWER_INPUTS}


def texts_of(context_BL: Tensor) -> list[bytes]:
    """Returns the encoder's texts, without padding."""
    return [bytes(byte for byte in row if byte >= 0) for row in context_BL.tolist()]


def _cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the cross entropy of each token; 0 for padding."""
    costs = F.cross_entropy(
        logits.flatten(0, 1), tokens.clamp_min(0).long().flatten(), reduction="none"
    ).view(tokens.shape)
    return costs * (tokens >= 0)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Returns the mean of each row over the entries that count."""
    return values.sum(1) / counted.sum(1).clamp_min(1)
