"""Stochastic Parameter Decomposition: components that add up to a net's weights, of which as few as
possible are needed at a time.

Bushnaq, Braun, Sharkey 2025 (arXiv 2506.20790).
"""

# B batch, N rows (examples, or positions of texts), K components of all matrices, … positions, if
# there are any

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.decomposition.anatomy import Anatomy
from models.decomposition.components import Components
from models.decomposition.known_answer import KnownAnswer
from models.decomposition.masking import Masks, errors, joined, routed
from models.layers import widen
from models.objective import Batch, Carry, Context, Objective, StepOut
from utils.errors import ConfigError, Stopped
from utils.measure.metrics import Metric
from utils.measure.report import Evaluator, Prediction
from utils.noise import Noise
from utils.ranks import signals
from utils.ranks.distributed import Dist
from utils.spec import IGNORE

DRAWN = ("stochastic", "layerwise", "subset", "adversarial")  # losses of nets masked at random
LOSSES = (*DRAWN, "unmasked", "masked")  # all that ask for the same answers
EPS = 1e-12
# What says which rows of a batch count; without either, as with prompts, there is nothing to
# measure
MEASURED = frozenset({"labels", "counts"})
LISTENING = 20  # steps of the warm-up between two looks at signals


class Decompose(Objective):
    """Each loss is a sum over rows times its coefficient; those with a coefficient of 0 cost
    nothing.
    """

    costs = frozenset({"loss", "faithfulness", "l0"})
    model: Components

    def __init__(
        self,
        model: Components,
        reconstruction: str,
        faithfulness: float,
        stochastic: float,
        layerwise: float,
        subset: float,
        adversarial: Mapping[str, Any],
        minimality: float,
        frequency: float,
        p: float,
        p_end: float | None,
        p_from: float,
        samples: int,
        whole: bool,
        warmup_steps: int,
        warmup_lr: float,
        live_above: float,
        known: Mapping[str, Any],
        unmasked: float = 0.0,
        masked: float = 0.0,
        sampling: str = "continuous",
        p_until: float = 1.0,
    ) -> None:
        super().__init__(model)
        self.coefficients = {
            "faithfulness": faithfulness,
            "stochastic": stochastic,
            "layerwise": layerwise,
            "subset": subset,
            "adversarial": adversarial["coefficient"],
            "unmasked": unmasked,
            "masked": masked,
            "minimality": minimality,
        }
        if not any(self.coefficients[name] for name in LOSSES):
            raise ConfigError(
                f"arch.loss.stochastic=0: all of {', '.join(LOSSES)} are 0, and nothing asks for"
                " the same answers; give one"
            )
        if reconstruction not in ("auto", "mse", "kl"):
            raise ConfigError(
                f"arch.loss.reconstruction={reconstruction}: choose one of auto, mse, kl"
            )
        if reconstruction == "kl" and not model.predicts_tokens:
            raise ConfigError(
                "arch.loss.reconstruction=kl: compares what is thought likely, and this net says"
                " numbers; use mse"
            )
        self.kl = model.predicts_tokens if reconstruction == "auto" else reconstruction == "kl"
        self.error_name = "kl" if self.kl else "mse"
        self.headline = Metric(f"{self.error_name}_rounded", lower_is_better=True)
        self.adversarial, self.frequency, self.samples, self.whole = (
            adversarial,
            frequency,
            samples,
            whole,
        )
        self.p, self.p_end = p, p if p_end is None else p_end
        self.p_from, self.p_until = p_from, p_until
        if p_until < p_from:
            raise ConfigError(
                f"arch.loss.p_until={p_until}: ends before arch.loss.p_from={p_from}; give a share"
                " of the run that is not less"
            )
        if sampling not in ("continuous", "binomial"):
            raise ConfigError(f"arch.loss.sampling={sampling}: choose continuous or binomial")
        self.binomial = sampling == "binomial"
        self.warmup_steps, self.warmup_lr, self.live_above, self.known = (
            warmup_steps,
            warmup_lr,
            live_above,
            known,
        )
        KnownAnswer.check(model, known)

    def prepare(self, dist: Dist, source: Any, noise: Noise) -> None:
        """Components add up to the weights before anything else is asked of them."""
        parameters = list(self.model.parts.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=self.warmup_lr, weight_decay=0.0, foreach=True)
        for step in range(self.warmup_steps):
            if step % LISTENING == 0 and (signum := signals.chosen(dist.sums(signals.flags()))):
                raise Stopped(
                    signum,
                    f"{signal.Signals(signum).name} in the warm-up, which begins again with the"
                    " same command",
                )
            optimizer.zero_grad()
            self._faithfulness().backward()
            optimizer.step()
        optimizer.zero_grad()

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns the adversary's sources if they persist from step to step; negative: none yet."""
        if not (self.coefficients["adversarial"] and self.adversarial["persistent"]):
            return None
        positions = tuple(batch["inputs"].shape[1:]) if self.model.predicts_tokens else ()
        shape = (len(batch["inputs"]), 1, *positions, self._width)
        return {"sources": torch.full(shape, -1.0, device=batch["inputs"].device)}

    def statistics(self, batch: Batch, carry: Carry, ctx: Context) -> dict[str, Tensor]:
        """How much of each component the whole batch needs, where its logarithm counts."""
        if not (self.frequency and self.coefficients["minimality"]):
            return {}
        inputs = self.model.watched(*self._inputs(batch))[1]
        taken, times = self._needed(inputs)
        gates = self.model.gate(inputs if taken is None else [each[taken] for each in inputs])
        return {"importance": self._importance(gates, times, ctx).double()}

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        x, documents = self._inputs(batch)
        said, inputs = self.model.watched(x, documents)
        taken, times = self._needed(inputs)
        if taken is not None:
            x, said, inputs = x[taken], said[taken], [each[taken] for each in inputs]
        gates = self.model.gate(inputs)
        lower, rows = (
            self.model.lower(gates),
            batch["inputs"].numel() if self.model.predicts_tokens else len(batch["inputs"]),
        )
        terms, carry = self._reconstruction(
            _Rows(x, documents, widen(said), lower, taken, len(batch["inputs"])), ctx.noise, carry
        )
        if self.coefficients["faithfulness"]:
            terms["faithfulness"] = self._faithfulness() * rows
        if self.coefficients["minimality"]:
            terms["minimality"] = self._minimality(gates, times, ctx)
        weight = torch.full((), rows, device=x.device)
        loss = torch.stack([self.coefficients[name] * term for name, term in terms.items()]).sum()
        live = (lower.detach() > self.live_above).sum(-1)
        terms["l0"] = (live if times is None else live * times).sum()
        return StepOut(
            loss, weight, {name: (term.detach(), weight) for name, term in terms.items()}, carry
        )

    def predict(self, batch: Batch) -> Prediction:
        """Compares the net's outputs with those of all its components, of the components scaled by
        their gates, and of the live ones alone.
        """
        if not MEASURED & batch.keys():
            return Prediction({})
        x, documents = self._inputs(batch)
        said, inputs = self.model.watched(x, documents)
        said, gates = widen(said), self.model.lower(self.model.gate(inputs))
        live = gates > self.live_above
        if "single" in batch:
            return Prediction({}, {"gates": gates, "live": live})
        counted = batch["labels"] != IGNORE if "labels" in batch else batch["counts"] > 0
        ways = {
            "unmasked": torch.ones_like(gates),
            "masked": gates,
            "rounded": live.to(gates.dtype),
        }
        kept: dict[str, Tensor] = {}
        masks = Masks(torch.stack(list(ways.values()), 1))
        answers = iter(ways)

        def measure(out: Tensor, wanted: Tensor) -> Tensor:
            if self.model.predicts_tokens:
                kept[next(answers)] = out
            return self._error(out, wanted)

        by_way = dict(
            zip(ways, errors(self.model, x, documents, said, masks, measure), strict=True)
        )
        total = counted.sum()
        metrics: dict[str, tuple[Tensor, Tensor]] = {
            f"{self.error_name}_{name}": ((error * counted).sum(), total)
            for name, error in by_way.items()
        }
        metrics["l0"] = ((live.sum(-1) * counted).sum(), total)
        for number, name in enumerate(self.model.names):
            metrics[f"l0/{name}"] = (
                (live[..., self.model.columns(number)].sum(-1) * counted).sum(),
                total,
            )
        metrics["faithfulness"] = (self._faithfulness() * total, total)
        if "labels" in batch:
            metrics |= {
                f"ce_{name}": (_cross_entropy(out, batch["labels"]), total)
                for name, out in {"target": said, **kept}.items()
            }
        return Prediction(metrics, {"gates": gates, "live": live, "counted": counted})

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        if "single" in row:
            return [KnownAnswer(self.model, self.known)]
        return [Anatomy(self.model)] if MEASURED & row.keys() else []

    def compile_net(self, graphs: bool = False) -> None:
        """Nothing is compiled: the net's matrices change places with masked ones in every pass, and
        each place would be another graph.
        """

    @property
    def _width(self) -> int:
        """How many numbers a mask is drawn from."""
        return self.model.total + self.whole * len(self.model.names)

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        inputs = batch["inputs"]
        return (
            (inputs, batch.get("documents"))
            if self.model.predicts_tokens
            else (inputs.to(self.model.dtype), None)
        )

    def _needed(self, inputs: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Rows to be computed, and for how many each stands; None: all, each for itself.

        Of a row from which no matrix gets anything, masks change nothing: nothing is wrong with it
        whatever they are, and all such rows have the same gates. One stands for all. A GPU would
        wait for the host to know how many.
        """
        if (
            self.model.predicts_tokens
            or inputs[0].device.type != "cpu"
            or self.coefficients["adversarial"]
        ):
            return None, None
        empty = torch.stack([(each == 0).all(-1) for each in inputs]).all(0)
        (full,), (none,) = (~empty).nonzero(as_tuple=True), empty.nonzero(as_tuple=True)
        if not len(none):
            return None, None
        times = widen(torch.ones(len(full) + 1, dtype=inputs[0].dtype))
        times[-1] = len(none)
        return torch.cat((full, none[:1])), times

    def _reconstruction(
        self, of: _Rows, noise: Noise, carry: Carry
    ) -> tuple[dict[str, Tensor], Carry]:
        """The losses that ask masked nets for the same answers, each with draws of its own."""
        asked = {
            name: self.samples if name == "stochastic" else 1
            for name in DRAWN
            if self.coefficients[name]
        }
        sources = noise.uniform("masks", of.shape(sum(asked.values()), self._width), of.taken).to(
            of.lower.dtype
        )
        drawn = zip(asked, sources.split(list(asked.values()), dim=1), strict=True)
        parts = {
            name: Masks.between(of.lower, self._sampled(each))
            for name, each in drawn
            if name != "adversarial"
        }
        # the components alone, without what they do not add up to
        if self.coefficients["unmasked"]:
            parts["unmasked"] = Masks(torch.ones_like(of.lower).unsqueeze(1))
        if self.coefficients["masked"]:
            parts["masked"] = Masks(of.lower.unsqueeze(1))
        if "subset" in parts:
            parts["subset"] = routed(parts["subset"], self.model, noise, of.batch, of.taken)
        if "adversarial" in asked:
            worst = self._worst(of, sources[:, -1:], carry)
            parts["adversarial"] = Masks.between(of.lower, worst)
            carry = {"sources": worst.float()} if carry is not None else None
        alone = parts.pop("layerwise", None)
        together = joined(list(parts.values())) if parts else Masks(of.lower.unsqueeze(1)[:, :0])
        passes = iter(errors(self.model, of.x, of.documents, of.said, together, self._error, alone))
        terms = {
            name: torch.stack([next(passes).sum() for _ in range(asked.get(name, 1))]).mean()
            for name in parts
        }
        if alone is not None:
            terms["layerwise"] = torch.stack([error.sum() for error in passes]).mean()
        return terms, carry

    def _sampled(self, sources: Tensor) -> Tensor:
        """Uniform draws as they are, or as ones and zeros for components; the rest of a matrix
        keeps a uniform one.
        """
        if not self.binomial:
            return sources
        components, rest = sources.split([self.model.total, self._width - self.model.total], -1)
        return torch.cat([(components >= 0.5).to(sources.dtype), rest], -1)

    def _worst(self, of: _Rows, sources: Tensor, carry: Carry) -> Tensor:
        """Masks that the net suffers most from, by ascent along the signs of gradients from where
        it begins.
        """
        gates = of.lower.detach()
        if carry is not None:
            sources = torch.where(carry["sources"] < 0, sources, carry["sources"].to(gates.dtype))
        for _ in range(self.adversarial["steps"]):
            with torch.enable_grad():
                sources.requires_grad_()
                (error,) = errors(
                    self.model,
                    of.x,
                    of.documents,
                    of.said,
                    Masks.between(gates, sources),
                    self._error,
                )
                (uphill,) = torch.autograd.grad(error.sum(), sources)
            sources = (sources.detach() + self.adversarial["rate"] * uphill.sign()).clamp_(0, 1)
        return sources

    def _error(self, out: Tensor, said: Tensor) -> Tensor:
        out = widen(out)
        if not self.kl:
            return (out - said).square().mean(-1)
        return F.kl_div(
            out.log_softmax(-1), said.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)

    def _faithfulness(self) -> Tensor:
        """The mean square of what the components do not add up to."""
        differences = self.model.differences()
        return torch.stack([each.square().sum() for each in differences]).sum() / sum(
            each.numel() for each in differences
        )

    def _importance(self, gates: Tensor, times: Tensor | None, ctx: Context) -> Tensor:
        """The importance loss of each component [K], summed over rows."""
        length = max(EPS, self.p_until - self.p_from)
        done = min(1.0, max(0.0, (ctx.progress - self.p_from) / length))
        p, gates = self.p + (self.p_end - self.p) * done, self.model.upper(gates).flatten(0, -2)
        gates = gates if p == 1 else (gates + EPS).pow(p)
        return gates.sum(0) if times is None else times @ gates

    def _minimality(self, gates: Tensor, times: Tensor | None, ctx: Context) -> Tensor:
        importance_K = self._importance(gates, times, ctx)
        if not self.frequency:
            return importance_K.sum()
        # f(S) = S (1 + β log2(1 + S)) of the sum over the whole batch; this share's gradient is
        # f'(S) times its own
        total_K = ctx.totals["importance"].to(importance_K.dtype)
        rate_K = 1 + self.frequency * torch.log2(1 + total_K)
        slope_K = rate_K + self.frequency * total_K / ((1 + total_K) * math.log(2))
        share_K = importance_K.detach()
        return (share_K * rate_K + slope_K * (importance_K - share_K)).sum()


@dataclass(frozen=True)
class _Rows:
    """Inputs, the net's outputs and gates; `taken` lists these rows of the batch if they are not
    all.
    """

    x: Tensor
    documents: Tensor | None
    said: Tensor
    lower: Tensor
    taken: Tensor | None
    batch: int

    def shape(self, passes: int, width: int) -> tuple[int, ...]:
        """The shape of the draws for the whole batch."""
        return (self.batch, passes, *self.lower.shape[1:-1], width)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        widen(logits).flatten(0, -2), labels.long().flatten(), ignore_index=IGNORE, reduction="sum"
    )
