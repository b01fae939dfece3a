"""Stochastic Parameter Decomposition: trains components that add up to a net's weights so that each
input needs as few of them as possible.

Bushnaq, Braun, Sharkey 2025 (arXiv 2506.20790).
"""

# B batch, N rows (examples, or positions of texts), K components of all matrices, … positions, if
# there are any

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from contract import (
    IGNORE,
    Batch,
    Carry,
    Context,
    Evaluator,
    Noise,
    Objective,
    Prediction,
    StepOut,
)
from models.decomposition.components import Components
from models.decomposition.first_inputs import start_at_inputs
from models.decomposition.gates import LowerLeaky, upper_leaky
from models.decomposition.known_answer import Known, KnownAnswer, check_known
from models.decomposition.masking import Masks, concat, masked_outputs, route
from models.decomposition.usage import Usage
from models.layers import widen
from utils.command.marks import Keys
from utils.errors import ConfigError, Stopped
from utils.ranks import signals
from utils.ranks.distributed import Dist
from utils.transfer import to_device

# losses that compare a masked net with the target
MASKED = ("stochastic", "layerwise", "subset")
EPS = 1e-12
SIGNAL_STEPS = 20  # the warm-up looks for signals after this many steps


class Losses(Keys):
    """The keys under `arch.loss`: coefficients of losses, and what else `Decompose` needs."""

    faithfulness: NonNegativeFloat
    """Mean square of a matrix minus the sum of its components"""
    stochastic: NonNegativeFloat
    """With all matrices masked at random"""
    layerwise: NonNegativeFloat
    """With one matrix masked at random, as a mean over matrices"""
    subset: NonNegativeFloat
    """With some of the matrices masked at random, drawn for each row"""
    minimality: NonNegativeFloat
    """Few components are needed: the sum of gates to the power of p"""
    p: Annotated[float, Field(gt=0, le=100)]
    """The power at the start of the run"""
    p_end: Annotated[float, Field(gt=0, le=100)] | None
    """The power at the end of the run; null: p"""
    warmup_steps: NonNegativeInt
    """Steps on faithfulness alone before the first step, also after init_from"""
    warmup_lr: Annotated[float, Field(gt=0, le=1000)]
    """Learning rate of these steps"""
    live_above: Annotated[float, Field(ge=0, lt=1)]
    """Evaluations take a component as needed if its gate is above this"""
    known: Known
    """The known answer of a toy model, by patterns of matrices"""
    positions: Literal["all", "last"]
    """Which outputs of a text are compared; last: those at its end alone, for nets that answer
    there
    """


class Decompose(Objective):
    """Sums losses over rows, each times its coefficient. A loss whose coefficient is 0 is not
    computed.
    """

    costs = frozenset({"loss", "faithfulness", "l0"})
    model: Components

    def __init__(self, model: Components, keys: Losses) -> None:
        super().__init__(model)
        self.keys = keys
        # coefficients by the names of losses, under which they are computed and logged
        names = ("faithfulness", *MASKED, "minimality")
        self.coefficients: dict[str, float] = {name: getattr(keys, name) for name in names}
        if not any(self.coefficients[name] for name in MASKED):
            raise ConfigError(
                f"arch.loss.stochastic=0: all of {', '.join(MASKED)} are 0, so that nothing"
                " compares outputs with the target's; give one of them"
            )
        if keys.positions == "last" and not model.predicts_tokens:
            raise ConfigError(
                "arch.loss.positions=last: compares outputs at the end of texts, and this net reads"
                " none; use all"
            )
        self.last_alone = keys.positions == "last"
        # the error is a divergence of distributions over tokens, or a square of numbers
        self.error_name = "kl" if model.predicts_tokens else "mse"
        self.headline = f"{self.error_name}_rounded"
        self.costs = self.costs | {self.headline}
        check_known(model, keys.known)

    def prepare(self, dist: Dist, source: Any, noise: Noise) -> None:
        """Starts components at inputs with `arch.init=inputs`, and trains them on faithfulness
        alone.
        """
        if self.model.init == "inputs":
            start_at_inputs(self.model, self._first_inputs(source, noise), noise, dist)
        # components must add up to the weights first: masking others would teach nothing
        parameters = list(self.model.parts.parameters())
        optimizer = torch.optim.AdamW(
            parameters, lr=self.keys.warmup_lr, weight_decay=0.0, foreach=True
        )
        for step in range(self.keys.warmup_steps):
            if step % SIGNAL_STEPS == 0:
                self._stop_if_asked(dist)
            optimizer.zero_grad()
            self._faithfulness().backward()
            optimizer.step()
        optimizer.zero_grad()  # or the first step would begin with the warm-up's last gradients

    def _stop_if_asked(self, dist: Dist) -> None:
        if signum := signals.agreed_signal(dist.sums(signals.flags)):
            name = signal.Signals(signum).name
            message = f"{name} in the warm-up, which begins again with the same command"
            raise Stopped(signum, message)

    def _first_inputs(self, source: Any, noise: Noise) -> list[list[Tensor]]:
        """Returns the inputs of each matrix in the first step, for each shard of this rank."""
        by_shard = []
        for shard in noise.shards:
            batch = {
                name: to_device(torch.from_numpy(array), noise.device)
                for name, array in source.train_batch(0, shard).items()
            }
            by_shard.append(self.model.probe(*self._inputs(batch))[1])
        return by_shard

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        # what the target computes, and how much of each component its inputs need
        examples = self._prepare_examples(batch)
        # a text has as many rows as positions, other examples are one row each
        rows = batch["inputs"].numel() if self.model.predicts_tokens else len(batch["inputs"])
        terms = self._reconstruction(examples, ctx)
        if self.coefficients["faithfulness"]:
            terms["faithfulness"] = self._faithfulness() * rows
        if self.coefficients["minimality"]:
            terms["minimality"] = self._minimality(examples, ctx)
        # terms are sums over rows, also where one row represents several
        weight = torch.full((), rows, device=examples.x.device)
        loss = torch.stack([self.coefficients[name] * term for name, term in terms.items()]).sum()
        # how many components a row needs on average
        live = (examples.gates.detach() > self.keys.live_above).sum(-1)
        terms["l0"] = (live if examples.repeats is None else live * examples.repeats).sum()
        metrics = {name: (term.detach(), weight) for name, term in terms.items()}
        return StepOut(loss, weight, metrics)

    def _prepare_examples(self, batch: Batch) -> _Examples:
        """Runs the target, and takes the rows to compute."""
        # the target's outputs are what masked nets are compared with, and its inputs open the gates
        x, documents = self._inputs(batch)
        target_out, inputs = self.model.probe(x, documents)
        rows, repeats = self._rows_to_compute(inputs)
        if rows is not None:
            x, target_out = x[rows], target_out[rows]
            inputs = [of_matrix[rows] for of_matrix in inputs]
        logits = self.model.gate_logits(inputs)
        return _Examples(
            x=x,
            documents=documents,
            target_out=widen(target_out),
            logits=logits,
            gates=LowerLeaky.apply(logits),
            batch=len(batch["inputs"]),
            rows=rows,
            repeats=repeats,
        )

    def predict(self, batch: Batch) -> Prediction:
        """Measures the error of the outputs with all components, with masks equal to the gates, and
        with the needed components alone.
        """
        if "labels" not in batch:
            return Prediction({})
        # the gates of each example, and what the target answers
        x, documents = self._inputs(batch)
        target_out, inputs = self.model.probe(x, documents)
        target_out = widen(target_out)
        gates = LowerLeaky.apply(self.model.gate_logits(inputs))
        live = gates > self.keys.live_above
        if "single" in batch:
            return Prediction({}, {"gates": gates, "live": live})
        labels = batch["labels"]
        counted = labels != IGNORE
        total = counted.sum()
        # three masked nets; the main metric is `rounded`, as a decomposition claims that the needed
        # components suffice
        masks_by_name = {
            "unmasked": torch.ones_like(gates),
            "masked": gates,
            "rounded": live.to(gates.dtype),
        }
        masks = Masks(torch.stack(list(masks_by_name.values()), 1))
        passes = masked_outputs(self.model, x, documents, masks)
        outputs = dict(zip(masks_by_name, (out for some in passes for out in some), strict=True))
        metrics: dict[str, tuple[Tensor, Tensor]] = {
            f"{self.error_name}_{name}": ((self._error(out, target_out) * counted).sum(), total)
            for name, out in outputs.items()
        }
        # for a language model also the loss on the true next tokens, beside the target's own
        if self.model.predicts_tokens:
            for name, out in {"target": target_out, **outputs}.items():
                metrics[f"ce_{name}"] = (_cross_entropy(out, labels), total)
        # how many components are needed, in all and by matrix
        metrics["l0"] = ((live.sum(-1) * counted).sum(), total)
        for number, name in enumerate(self.model.names):
            live_here = live[..., self.model.columns(number)].sum(-1)
            metrics[f"l0/{name}"] = ((live_here * counted).sum(), total)
        metrics["faithfulness"] = (self._faithfulness() * total, total)
        return Prediction(metrics, {"gates": gates, "live": live, "counted": counted})

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        if "single" in row:
            return [KnownAnswer(self.model, self.keys.known)]
        return [Usage(self.model)] if "labels" in row else []

    def compile_net(self) -> None:
        """Compiles nothing: other matrices are replaced by masked ones in each pass, and each
        choice would be another graph.
        """

    @property
    def _width(self) -> int:
        """The number of sources of an input, from 0 to 1: one for each component and for the rest
        of each matrix. At 0 a mask equals its gate, at 1 it is open.
        """
        return self.model.total + len(self.model.names)

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns what the target reads, and the documents of a text."""
        if self.model.predicts_tokens:
            return batch["inputs"], batch.get("documents")
        return batch["inputs"].to(self.model.dtype), None

    def _rows_to_compute(self, inputs: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Returns the indices of the rows to compute, and how many equal rows each represents;
        None: all rows, each itself.

        If all matrices read zeros in a row, masks do not change its outputs, so its error is 0, and
        its gates are those of all such rows. One of them is computed for all. Not on a GPU, which
        would have to wait until the host knows their number.
        """
        if self.model.predicts_tokens or inputs[0].device.type != "cpu":
            return None, None
        empty = torch.stack([(of_matrix == 0).all(-1) for of_matrix in inputs]).all(0)
        rows, empty_rows = (~empty).nonzero()[:, 0], empty.nonzero()[:, 0]
        if not len(empty_rows):
            return None, None
        repeats = widen(torch.ones(len(rows) + 1, dtype=inputs[0].dtype))
        repeats[-1] = len(empty_rows)
        return torch.cat((rows, empty_rows[:1])), repeats

    def _reconstruction(self, examples: _Examples, ctx: Context) -> dict[str, Tensor]:
        """Returns the losses that compare masked nets with the target, each with its own draws."""
        # random masks between the gate and 1: a component that a gate calls needless must not
        # matter, whether it is there or not
        asked = [name for name in MASKED if self.coefficients[name]]
        shape = examples.shape(len(asked), self._width)
        sources = ctx.noise.uniform("masks", shape, examples.rows).to(examples.gates.dtype)
        masks = {
            name: Masks.between(examples.gates, of_loss)
            for name, of_loss in zip(asked, sources.split(1, dim=1), strict=True)
        }
        if "subset" in asked:
            masks["subset"] = route(
                masks["subset"], self.model, ctx.noise, examples.batch, examples.rows
            )
        # layerwise masks one matrix in each pass, all others mask all matrices: computed together
        one_by_one = masks.pop("layerwise", None)
        none = Masks.between(examples.gates, sources[:, :0])  # no pass, if layerwise is alone
        passes = masked_outputs(
            self.model,
            examples.x,
            examples.documents,
            concat([none, *masks.values()]),
            one_by_one,
        )
        # errors come in the order of the passes: first one for each loss, then one for each matrix
        errors = [
            error.sum() for some in passes for error in self._error(some, examples.target_out)
        ]
        terms = dict(zip(masks, errors[: len(masks)], strict=True))
        if one_by_one is not None:
            terms["layerwise"] = torch.stack(errors[len(masks) :]).mean()
        return terms

    def _error(self, out: Tensor, target_out: Tensor) -> Tensor:
        """Returns the error of each row. Where only the ends of texts count, the error of an end is
        that of all positions of its text, so that means over positions are means over texts.
        """
        if not self.last_alone:
            return self._row_errors(out, target_out)
        length = out.shape[-2]
        ends = self._row_errors(out[..., -1:, :], target_out[..., -1:, :])
        return F.pad(length * ends, (length - 1, 0))

    def _row_errors(self, out: Tensor, target_out: Tensor) -> Tensor:
        out = widen(out)
        if not self.model.predicts_tokens:
            return (out - target_out).square().mean(-1)
        return F.kl_div(
            out.log_softmax(-1), target_out.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)

    def _faithfulness(self) -> Tensor:
        """Returns the mean square of what is left of the matrices without their components."""
        # one mean over the numbers of all matrices, so that a large matrix weighs more
        remainders = self.model.remainders()
        squares = torch.stack([remainder.square().sum() for remainder in remainders]).sum()
        return squares / sum(remainder.numel() for remainder in remainders)

    def _minimality(self, examples: _Examples, ctx: Context) -> Tensor:
        """Returns the sum of all gates to the power of p."""
        # p moves linearly over the run: a smaller power cares less how far a gate is open, and more
        # whether it is
        start, end = self.keys.p, self.keys.p if self.keys.p_end is None else self.keys.p_end
        p = start + (end - start) * ctx.progress
        gates = upper_leaky(examples.logits).flatten(0, -2)
        # a little more than 0, where the slope of a power below 1 is infinite
        gates = gates if p == 1 else (gates + EPS).pow(p)
        return (gates.sum(0) if examples.repeats is None else examples.repeats @ gates).sum()


@dataclass(frozen=True)
class _Examples:
    """The rows of a batch to compute, with what the target answers."""

    x: Tensor
    documents: Tensor | None
    target_out: Tensor
    logits: Tensor  # gates before clamping
    gates: Tensor
    batch: int  # the size of the batch
    rows: Tensor | None  # indices of these rows in the batch, if they are not all
    repeats: Tensor | None  # how many rows each represents, if not itself alone

    def shape(self, passes: int, width: int) -> tuple[int, ...]:
        """Returns the shape of draws for the whole batch."""
        return (self.batch, passes, *self.gates.shape[1:-1], width)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        widen(logits).flatten(0, -2), labels.long().flatten(), ignore_index=IGNORE, reduction="sum"
    )
