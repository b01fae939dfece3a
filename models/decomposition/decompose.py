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
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.decomposition.adversary import Adversary, sum_name, uphill
from models.decomposition.anatomy import Anatomy
from models.decomposition.components import Components
from models.decomposition.first_inputs import read_inputs
from models.decomposition.known_answer import KnownAnswer
from models.decomposition.masking import Masks, concat, errors, hidden_errors, route
from models.layers import widen
from models.objective import Batch, Carry, Context, Objective, StepOut
from utils.errors import ConfigError, Stopped
from utils.measure.metrics import Metric
from utils.measure.report import Evaluator, Prediction
from utils.noise import Noise
from utils.ranks import signals
from utils.ranks.distributed import Dist
from utils.spec import IGNORE
from utils.transfer import to_device

# losses of nets masked at random
DRAWN = ("stochastic", "layerwise", "subset", "hidden", "adversarial")
# all that ask for the same answers
LOSSES = (*DRAWN, "unmasked", "masked", "masked_layerwise", "masked_subset")
ALONE = ("layerwise", "masked_layerwise")  # those that mask one matrix at a time
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
        hidden: float = 0.0,
        masked_layerwise: float = 0.0,
        masked_subset: float = 0.0,
        subset_probability: float | None = None,
    ) -> None:
        super().__init__(model)
        self.adversary = Adversary(**adversarial)
        self.coefficients = {
            "faithfulness": faithfulness,
            "stochastic": stochastic,
            "layerwise": layerwise,
            "subset": subset,
            "adversarial": self.adversary.coefficient,
            "unmasked": unmasked,
            "masked": masked,
            "masked_layerwise": masked_layerwise,
            "masked_subset": masked_subset,
            "hidden": hidden,
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
        self.frequency, self.samples, self.whole = frequency, samples, whole
        self.subset_probability = subset_probability
        if hidden and all(seam.indexed for seam in model.seams.values()):
            raise ConfigError(
                "arch.loss.hidden: compares what matrices read, and embeddings read numbers of"
                " rows; choose other matrices by arch.modules as well"
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
        self._anatomy: Anatomy | None = None  # of an evaluation that has seen no batch yet

    def prepare(self, dist: Dist, source: Any, noise: Noise) -> None:
        """Components read inputs of the data if `arch.init` says so, and add up to the weights
        before anything else is asked of them.
        """
        if self.model.init == "inputs":
            read_inputs(self.model, self._first_inputs(source, noise), noise, dist)
        parameters = list(self.model.parts.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=self.warmup_lr, weight_decay=0.0, foreach=True)
        for step in range(self.warmup_steps):
            if step % LISTENING == 0 and (
                signum := signals.agreed_signal(dist.sums(signals.flags()))
            ):
                raise Stopped(
                    signum,
                    f"{signal.Signals(signum).name} in the warm-up, which begins again with the"
                    " same command",
                )
            optimizer.zero_grad()
            self._faithfulness().backward()
            optimizer.step()
        optimizer.zero_grad()

    def _first_inputs(self, source: Any, noise: Noise) -> list[list[Tensor]]:
        """The inputs of each matrix in the first step, for each shard of this rank."""
        by_shard = []
        for shard in noise.shards:
            batch = {
                name: to_device(torch.from_numpy(array), noise.device)
                for name, array in source.train_batch(0, shard).items()
            }
            by_shard.append(self.model.probe(*self._inputs(batch))[1])
        return by_shard

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns the adversary's sources if they persist from step to step; negative: none yet."""
        if not (self.adversary.coefficient and self.adversary.persistent):
            return None
        positions = tuple(batch["inputs"].shape[1:]) if self.model.predicts_tokens else ()
        shape = (len(batch["inputs"]), 1, *positions, self._width)
        return {"sources": torch.full(shape, -1.0, device=batch["inputs"].device)}

    def rounds(self) -> int:
        """Ascent that all rows share takes each step by a sum over the whole batch."""
        return self.adversary.steps if self._climbs_together else 1

    @property
    def _climbs_together(self) -> bool:
        return bool(self.adversary.coefficient) and self.adversary.shared

    def statistics(self, batch: Batch, carry: Carry, ctx: Context) -> dict[str, Tensor]:
        """How much of each component the whole batch needs, where its logarithm counts; and where
        masks that all rows share do more harm.
        """
        weighs = self.frequency and self.coefficients["minimality"]
        weighs = weighs and "importance" not in ctx.totals  # the first round has summed it
        if not (weighs or self._climbs_together):
            return {}
        of, gates = self._seen(batch)
        sums = {}
        if weighs:
            sums["importance"] = self._importance(gates, of.times, ctx).double()
        if self._climbs_together:
            done = sum(name.startswith("uphill/") for name in ctx.totals)
            sources = self._shared_sources(of, ctx)
            sums[sum_name(done)] = uphill(sources, partial(self._harm, of)).double()
        return sums

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        of, gates = self._seen(batch)
        rows = batch["inputs"].numel() if self.model.predicts_tokens else len(batch["inputs"])
        terms, carry = self._reconstruction(of, ctx, carry)
        if self.coefficients["faithfulness"]:
            terms["faithfulness"] = self._faithfulness() * rows
        if self.coefficients["minimality"]:
            terms["minimality"] = self._minimality(gates, of.times, ctx)
        weight = torch.full((), rows, device=of.x.device)
        loss = torch.stack([self.coefficients[name] * term for name, term in terms.items()]).sum()
        live = (of.gates.detach() > self.live_above).sum(-1)
        terms["l0"] = (live if of.times is None else live * of.times).sum()
        return StepOut(
            loss, weight, {name: (term.detach(), weight) for name, term in terms.items()}, carry
        )

    def _seen(self, batch: Batch) -> tuple[_Examples, Tensor]:
        """The rows to be computed, and the gates of each before they are held between 0 and 1."""
        x, documents = self._inputs(batch)
        said, inputs = self.model.probe(x, documents)
        taken, times = self._needed(inputs)
        if taken is not None:
            x, said, inputs = x[taken], said[taken], [each[taken] for each in inputs]
        gates = self.model.gate_logits(inputs)
        lower, count = self.model.lower_gates(gates), len(batch["inputs"])
        return _Examples(x, documents, widen(said), lower, taken, count, inputs, times), gates

    def predict(self, batch: Batch) -> Prediction:
        """Compares the net's outputs with those of all its components, of the components scaled by
        their gates, and of the live ones alone.
        """
        if not MEASURED & batch.keys():
            return Prediction({})
        x, documents = self._inputs(batch)
        said, inputs = self.model.probe(x, documents)
        said, gates = widen(said), self.model.lower_gates(self.model.gate_logits(inputs))
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
        if self.adversary.evaluate:
            of = _Examples(x, documents, said, gates, None, len(x), inputs, counted=counted)
            metrics[f"{self.error_name}_adversarial"] = (self._worst_case(of), total)
        if "labels" in batch:
            metrics |= {
                f"ce_{name}": (_cross_entropy(out, batch["labels"]), total)
                for name, out in {"target": said, **kept}.items()
            }
        if self._anatomy is not None:
            # here and not in the evaluator: only here has sync=fsdp gathered the weights
            where = counted.unsqueeze(-1)
            self._anatomy.attribute(self.model, x, documents, gates * where, live & where)
            self._anatomy = None
        return Prediction(metrics, {"gates": gates, "live": live, "counted": counted})

    def _worst_case(self, of: _Examples) -> Tensor:
        """The errors of evaluated rows, in sum, under the worst masks that ascent finds. Draws are
        the same in all evaluations.
        """
        noise = Noise(0, 0, [0], of.x.device)
        drawn = noise.uniform("masks", of.shape(1, self._width)).to(of.gates.dtype)
        first = self.adversary.first(drawn, noise)
        worst = self.adversary.climbed(first, partial(self._harm, of), self.adversary.evaluate)
        return self._harm(of, worst)

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        if "single" in row:
            return [KnownAnswer(self.model, self.known)]
        if not MEASURED & row.keys():
            return []
        self._anatomy = Anatomy(self.model)
        return [self._anatomy]

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
        self, of: _Examples, ctx: Context, carry: Carry
    ) -> tuple[dict[str, Tensor], Carry]:
        """The losses that ask masked nets for the same answers, each with draws of its own."""
        asked = {
            name: self.samples if name in ("stochastic", "hidden") else 1
            for name in DRAWN
            if self.coefficients[name]
        }
        sources = ctx.noise.uniform(
            "masks", of.shape(sum(asked.values()), self._width), of.rows
        ).to(of.gates.dtype)
        drawn = zip(asked, sources.split(list(asked.values()), dim=1), strict=True)
        parts = {
            name: Masks.between(of.gates, self._sampled(each))
            for name, each in drawn
            if name != "adversarial"
        } | self._as_gates_say(of)
        for name in ("subset", "masked_subset"):
            if name in parts:
                parts[name] = route(
                    parts[name],
                    self.model,
                    ctx.noise,
                    of.batch,
                    of.rows,
                    self.subset_probability,
                    name.replace("_", " "),
                )
        if "adversarial" in asked:
            worst = self._worst(of, sources[:, -1:], ctx, carry)
            parts["adversarial"] = self._under(of, of.gates, worst)
            carry = {"sources": worst.float()} if carry is not None else None
        hidden = parts.pop("hidden", None)
        terms = self._answers(of, parts)
        if hidden is not None:
            changes = hidden_errors(self.model, of.x, of.documents, of.inputs, hidden)
            terms["hidden"] = torch.stack([change.sum() for change in changes]).mean()
        return terms, carry

    def _as_gates_say(self, of: _Examples) -> dict[str, Masks]:
        """Masks that nothing is drawn for: all components and no more, or as far as gates are open
        and no more.
        """
        gates = Masks(of.gates.unsqueeze(1))
        parts = {"unmasked": Masks(torch.ones_like(gates.components))}
        parts |= dict.fromkeys(("masked", "masked_layerwise", "masked_subset"), gates)
        return {name: part for name, part in parts.items() if self.coefficients[name]}

    def _answers(self, of: _Examples, parts: dict[str, Masks]) -> dict[str, Tensor]:
        """The error of the net's answers under each of these masks, a mean over its passes."""
        alone = {name: parts.pop(name) for name in ALONE if name in parts}
        together = concat(list(parts.values())) if parts else Masks(of.gates.unsqueeze(1)[:, :0])
        passes = iter(
            errors(
                self.model,
                of.x,
                of.documents,
                of.said,
                together,
                self._error,
                concat(list(alone.values())) if alone else None,
            )
        )
        counts = {name: part.components.shape[1] for name, part in parts.items()}
        counts |= dict.fromkeys(alone, len(self.model.names))
        return {
            name: torch.stack([next(passes).sum() for _ in range(count)]).mean()
            for name, count in counts.items()
        }

    def _sampled(self, sources: Tensor) -> Tensor:
        """Uniform draws as they are, or as ones and zeros for components; the rest of a matrix
        keeps a uniform one.
        """
        if not self.binomial:
            return sources
        components, rest = sources.split([self.model.total, self._width - self.model.total], -1)
        return torch.cat([(components >= 0.5).to(sources.dtype), rest], -1)

    def _worst(self, of: _Examples, drawn: Tensor, ctx: Context, carry: Carry) -> Tensor:
        """Sources of the masks that the net suffers most from."""
        if self.adversary.shared:
            return self._shared_sources(of, ctx)
        sources = self.adversary.first(drawn, ctx.noise)
        if carry is not None:
            sources = torch.where(carry["sources"] < 0, sources, carry["sources"].to(drawn.dtype))
        return self.adversary.climbed(sources, partial(self._harm, of), self.adversary.steps)

    def _shared_sources(self, of: _Examples, ctx: Context) -> Tensor:
        """Sources that all rows of the batch share, as far as their ascent has come."""
        like = of.gates.new_empty((1, 1, *of.gates.shape[1:-1], self._width))
        return self.adversary.climbed_together(self.adversary.first(like, ctx.noise), ctx.totals)

    def _harm(self, of: _Examples, sources: Tensor) -> Tensor:
        """How much the net errs under these sources, in sum."""
        masks = self._under(of, of.gates.detach(), sources)
        (error,) = errors(self.model, of.x, of.documents, of.said, masks, self._error)
        return (error if of.counted is None else error * of.counted).sum()

    def _under(self, of: _Examples, gates: Tensor, sources: Tensor) -> Masks:
        """The masks that these sources make of gates [B, …, K]; all rows may share sources."""
        shape = (len(gates), 1, *gates.shape[1:-1], sources.shape[-1])
        return Masks.between(gates, sources.expand(shape))

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
        p = self.p + (self.p_end - self.p) * done
        gates = self.model.upper_gates(gates).flatten(0, -2)
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
class _Examples:
    """Inputs, the net's outputs and gates; `rows` are their rows of the batch if they are not
    all.
    """

    x: Tensor
    documents: Tensor | None
    said: Tensor
    gates: Tensor
    rows: Tensor | None
    batch: int
    inputs: Sequence[Tensor]  # of each matrix
    times: Tensor | None = None  # for how many each row stands, if not for itself
    counted: Tensor | None = None  # in evaluations: padding does not count

    def shape(self, passes: int, width: int) -> tuple[int, ...]:
        """The shape of the draws for the whole batch."""
        return (self.batch, passes, *self.gates.shape[1:-1], width)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        widen(logits).flatten(0, -2), labels.long().flatten(), ignore_index=IGNORE, reduction="sum"
    )
