"""Stochastic Parameter Decomposition: trains components that add up to a net's weights so that each
input needs as few of them as possible.

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
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, with_config
from torch import Tensor
from typing_extensions import Doc, TypedDict

from models.decomposition.adversary import GRADIENT, Adversary, source_gradient
from models.decomposition.anatomy import Anatomy
from models.decomposition.components import Components
from models.decomposition.first_inputs import start_at_inputs
from models.decomposition.known_answer import KnownAnswer
from models.decomposition.masking import Masks, concat, errors, hidden_errors, route
from models.layers import widen
from models.objective import Batch, Carry, Context, Objective, StepOut
from utils.command.marks import STRICT, Share
from utils.errors import ConfigError, Stopped
from utils.measure.evaluator import Evaluator, Prediction
from utils.measure.metrics import Metric
from utils.noise import Noise
from utils.ranks import signals
from utils.ranks.distributed import Dist
from utils.spec import IGNORE
from utils.transfer import to_device

# losses whose masks are drawn at random
DRAWN = ("stochastic", "layerwise", "subset", "hidden", "adversarial")
# all losses that compare a masked net with the target
LOSSES = (*DRAWN, "unmasked", "masked", "masked_layerwise", "masked_subset")
ONE_AT_A_TIME = ("layerwise", "masked_layerwise")  # these mask one matrix and leave the others
EPS = 1e-12
# keys that say which rows of a batch count; batches with neither, such as prompts, have nothing to
# measure
SIGNAL_STEPS = 20  # the warm-up looks for signals after this many steps


@with_config(STRICT)
class AdversarialKeys(TypedDict):
    """With the worst masks that ascent finds."""

    coefficient: NonNegativeFloat
    steps: Annotated[PositiveInt, Doc("steps of ascent")]
    rate: Annotated[float, Field(gt=0, le=1), Doc("by how much a step changes each mask")]
    persistent: Annotated[
        bool, Doc("ascent continues, for each row of the batch, where it ended in the step before")
    ]
    scope: Annotated[
        Literal["row", "batch"],
        Doc("row: each row has masks of its own; batch: all rows of the batch have the same"),
    ]
    init: Annotated[
        Literal["random", "ones", "zeroes"],
        Doc("where ascent starts, between gates (0) and open masks (1)"),
    ]
    evaluate: Annotated[
        NonNegativeInt,
        Doc(
            "steps of ascent in evaluations, which then report the error under these masks; 0: none"
        ),
    ]


@with_config(STRICT)
class KnownKeys(TypedDict):
    """The known answer of a toy model, by patterns of matrices."""

    identity: Annotated[list[str], Doc("each feature has a component of its own")]
    dense: Annotated[list[str], Doc("each component serves several features")]
    components: Annotated[
        PositiveInt | None,
        Doc("number of components of each dense matrix, without others; needed with dense"),
    ]


class Decompose(Objective):
    """Sums losses over rows, each times its coefficient. A loss whose coefficient is 0 is not
    computed.
    """

    costs = frozenset({"loss", "faithfulness", "l0"})
    model: Components

    def __init__(
        self,
        model: Components,
        reconstruction: Annotated[
            Literal["auto", "mse", "kl"],
            Doc("how outputs are compared; auto: kl if the net predicts tokens, else mse"),
        ],
        faithfulness: Annotated[
            NonNegativeFloat, Doc("mean square of what the components of a matrix do not add up to")
        ],
        stochastic: Annotated[NonNegativeFloat, Doc("with all matrices masked at random")],
        layerwise: Annotated[
            NonNegativeFloat, Doc("with one matrix masked at random, as a mean over matrices")
        ],
        subset: Annotated[
            NonNegativeFloat, Doc("with some of the matrices masked at random, drawn for each row")
        ],
        adversarial: Annotated[AdversarialKeys, Doc("with the worst masks that ascent finds")],
        minimality: Annotated[
            NonNegativeFloat, Doc("few components are needed: the sum of gates to the power of p")
        ],
        frequency: Annotated[
            NonNegativeFloat,
            Doc(
                "components that many inputs need cost more: times 1 + this × log2(1 + sum over "
                "the batch)"
            ),
        ],
        p: Annotated[float, Field(gt=0, le=100)],
        p_end: Annotated[
            Annotated[float, Field(gt=0, le=100)] | None,
            Doc("the power at the end of the run; null: p"),
        ],
        p_from: Annotated[
            float, Field(ge=0, lt=1), Doc("share of the run after which the power begins to change")
        ],
        samples: Annotated[
            int,
            Field(ge=1, le=1000),
            Doc("draws of masks for the stochastic loss and the hidden one"),
        ],
        whole: Annotated[
            bool, Doc("the remainder of each matrix is one more component, with a mask of its own")
        ],
        warmup_steps: Annotated[
            NonNegativeInt,
            Doc("steps on faithfulness alone before the first step, also after init_from"),
        ],
        warmup_lr: Annotated[float, Field(gt=0, le=1000), Doc("learning rate of these steps")],
        live_above: Annotated[
            float,
            Field(ge=0, lt=1),
            Doc("evaluations take a component as needed if its gate is above this"),
        ],
        known: Annotated[
            KnownKeys, Doc("the known answer of a toy model, by patterns of matrices")
        ],
        unmasked: Annotated[NonNegativeFloat, Doc("with all components and no remainder")] = 0.0,
        masked: Annotated[NonNegativeFloat, Doc("with masks equal to the gates")] = 0.0,
        sampling: Annotated[
            Literal["continuous", "binomial"],
            Doc("a mask is drawn between its gate and 1, or is either of the two"),
        ] = "continuous",
        p_until: Annotated[Share, Doc("share of the run after which it has changed")] = 1.0,
        hidden: Annotated[
            NonNegativeFloat,
            Doc(
                "mean square by which the inputs of matrices change when all matrices are "
                "masked at random"
            ),
        ] = 0.0,
        masked_layerwise: Annotated[
            NonNegativeFloat, Doc("the same for one matrix at a time, as a mean over matrices")
        ] = 0.0,
        masked_subset: Annotated[
            NonNegativeFloat, Doc("the same for some of the matrices, drawn for each row")
        ] = 0.0,
        subset_probability: Annotated[
            Annotated[float, Field(gt=0, le=1)] | None,
            Doc(
                "probability that a matrix is masked; null: the number of masked matrices is "
                "drawn evenly from 1 to all"
            ),
        ] = None,
        positions: Annotated[
            Literal["all", "last"],
            Doc(
                "which outputs of a text are compared; last: those at its end alone, for nets "
                "that answer there"
            ),
        ] = "all",
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
                f"arch.loss.stochastic=0: all of {', '.join(LOSSES)} are 0, so that nothing"
                " compares outputs with the target's; give one of them"
            )
        if reconstruction == "kl" and not model.predicts_tokens:
            raise ConfigError(
                "arch.loss.reconstruction=kl: compares probabilities of tokens, and this net"
                " predicts numbers; use mse"
            )
        if positions == "last" and not model.predicts_tokens:
            raise ConfigError(
                "arch.loss.positions=last: compares outputs at the end of texts, and this net reads"
                " none; use all"
            )
        self.last_alone = positions == "last"
        self.kl = model.predicts_tokens if reconstruction == "auto" else reconstruction == "kl"
        self.error_name = "kl" if self.kl else "mse"
        self.headline = Metric(f"{self.error_name}_rounded", lower_is_better=True)
        self.frequency, self.samples, self.whole = frequency, samples, whole
        self.subset_probability = subset_probability
        if hidden and all(seam.indexed for seam in model.seams.values()):
            raise ConfigError(
                f"arch.loss.hidden={hidden}: compares the inputs of matrices, and those of"
                " embeddings are indices; choose other matrices by arch.modules as well"
            )
        self.p, self.p_end = p, p if p_end is None else p_end
        self.p_from, self.p_until = p_from, p_until
        if p_until < p_from:
            raise ConfigError(
                f"arch.loss.p_until={p_until}: ends before arch.loss.p_from={p_from}; give a share"
                " of the run that is not less"
            )
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
        """Lets components begin at inputs if `arch.init` says so, and trains them on faithfulness
        alone.
        """
        if self.model.init == "inputs":
            start_at_inputs(self.model, self._first_inputs(source, noise), noise, dist)
        parameters = list(self.model.parts.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=self.warmup_lr, weight_decay=0.0, foreach=True)
        for step in range(self.warmup_steps):
            if step % SIGNAL_STEPS == 0 and (
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
        """Returns the inputs of each matrix in the first step, for each shard of this rank."""
        by_shard = []
        for shard in noise.shards:
            batch = {
                name: to_device(torch.from_numpy(array), noise.device)
                for name, array in source.train_batch(0, shard).items()
            }
            by_shard.append(self.model.probe(*self._inputs(batch))[1])
        return by_shard

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns the adversary's sources if they persist from step to step: negative until the
        first step has set them.
        """
        if not (self.adversary.coefficient and self.adversary.persistent):
            return None
        positions = tuple(batch["inputs"].shape[1:]) if self.model.predicts_tokens else ()
        shape = (len(batch["inputs"]), 1, *positions, self._width)
        return {"sources": torch.full(shape, -1.0, device=batch["inputs"].device)}

    def rounds(self) -> int:
        """Returns the steps of ascent if all rows share masks: each needs a sum over the batch."""
        return self.adversary.steps if self._ascends_together else 1

    @property
    def _ascends_together(self) -> bool:
        return bool(self.adversary.coefficient) and self.adversary.shared

    def statistics(self, batch: Batch, carry: Carry, ctx: Context) -> dict[str, Tensor]:
        """Returns what losses need of the whole batch: the importance of each component for
        `frequency`, and the gradient of sources that all rows share.
        """
        weighs = self.frequency and self.coefficients["minimality"]
        weighs = weighs and "importance" not in ctx.totals  # the first round has summed it
        if not (weighs or self._ascends_together):
            return {}
        examples, gates = self._prepare_examples(batch)
        sums = {}
        if weighs:
            sums["importance"] = self._importance(gates, examples.repeats, ctx).double()
        if self._ascends_together:
            steps = sum(name.startswith(GRADIENT) for name in ctx.totals)
            sources = self._shared_sources(examples, ctx)
            gradient = source_gradient(sources, partial(self._total_error, examples))
            sums[f"{GRADIENT}{steps}"] = gradient.double()
        return sums

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        examples, gates = self._prepare_examples(batch)
        rows = batch["inputs"].numel() if self.model.predicts_tokens else len(batch["inputs"])
        terms, carry = self._reconstruction(examples, ctx, carry)
        if self.coefficients["faithfulness"]:
            terms["faithfulness"] = self._faithfulness() * rows
        if self.coefficients["minimality"]:
            terms["minimality"] = self._minimality(gates, examples.repeats, ctx)
        weight = torch.full((), rows, device=examples.x.device)
        loss = torch.stack([self.coefficients[name] * term for name, term in terms.items()]).sum()
        live = (examples.gates.detach() > self.live_above).sum(-1)
        terms["l0"] = (live if examples.repeats is None else live * examples.repeats).sum()
        return StepOut(
            loss, weight, {name: (term.detach(), weight) for name, term in terms.items()}, carry
        )

    def _prepare_examples(self, batch: Batch) -> tuple[_Examples, Tensor]:
        """Returns the rows to compute, and their gates before clamping."""
        x, documents = self._inputs(batch)
        target_out, inputs = self.model.probe(x, documents)
        taken, repeats = self._rows_to_compute(inputs)
        if taken is not None:
            x, target_out, inputs = x[taken], target_out[taken], [each[taken] for each in inputs]
        gates = self.model.gate_logits(inputs)
        lower, count = self.model.lower_gates(gates), len(batch["inputs"])
        return _Examples(
            x, documents, widen(target_out), lower, taken, count, inputs, repeats
        ), gates

    def predict(self, batch: Batch) -> Prediction:
        """Measures the error of the outputs with all components, with masks equal to the gates, and
        with the needed components alone.
        """
        if "labels" not in batch:
            return Prediction({})
        x, documents = self._inputs(batch)
        target_out, inputs = self.model.probe(x, documents)
        target_out = widen(target_out)
        gates = self.model.lower_gates(self.model.gate_logits(inputs))
        live = gates > self.live_above
        if "single" in batch:
            return Prediction({}, {"gates": gates, "live": live})
        counted = batch["labels"] != IGNORE
        masks_by_name = {
            "unmasked": torch.ones_like(gates),
            "masked": gates,
            "rounded": live.to(gates.dtype),
        }
        kept: dict[str, Tensor] = {}
        masks = Masks(torch.stack(list(masks_by_name.values()), 1))
        names = iter(masks_by_name)

        def measure(out: Tensor, target_out: Tensor) -> Tensor:
            if self.model.predicts_tokens:
                kept[next(names)] = out
            return self._error(out, target_out)

        passes = errors(self.model, x, documents, target_out, masks, measure)
        error_by_name = dict(zip(masks_by_name, passes, strict=True))
        total = counted.sum()
        metrics: dict[str, tuple[Tensor, Tensor]] = {
            f"{self.error_name}_{name}": ((error * counted).sum(), total)
            for name, error in error_by_name.items()
        }
        metrics["l0"] = ((live.sum(-1) * counted).sum(), total)
        for number, name in enumerate(self.model.names):
            metrics[f"l0/{name}"] = (
                (live[..., self.model.columns(number)].sum(-1) * counted).sum(),
                total,
            )
        metrics["faithfulness"] = (self._faithfulness() * total, total)
        if self.adversary.evaluate:
            examples = _Examples(
                x, documents, target_out, gates, None, len(x), inputs, counted=counted
            )
            metrics[f"{self.error_name}_adversarial"] = (self._adversarial_error(examples), total)
        if "labels" in batch:
            metrics |= {
                f"ce_{name}": (_cross_entropy(out, batch["labels"]), total)
                for name, out in {"target": target_out, **kept}.items()
            }
        if self._anatomy is not None:
            # here and not in the evaluator: only here has sync=fsdp gathered the weights
            where = counted.unsqueeze(-1)
            self._anatomy.attribute(self.model, x, documents, gates * where, live & where)
            self._anatomy = None
        return Prediction(metrics, {"gates": gates, "live": live, "counted": counted})

    def _adversarial_error(self, examples: _Examples) -> Tensor:
        """Returns the error of evaluated rows, summed, under the worst masks that ascent finds.
        Draws are the same in all evaluations.
        """
        noise = Noise(0, 0, [0], examples.x.device)
        drawn = noise.uniform("masks", examples.shape(1, self._width)).to(examples.gates.dtype)
        first = self.adversary.initial_sources(drawn, noise)
        worst = self.adversary.ascend(
            first, partial(self._total_error, examples), self.adversary.evaluate
        )
        return self._total_error(examples, worst)

    def evaluators(self, row: Mapping[str, Any]) -> Sequence[Evaluator]:
        if "single" in row:
            return [KnownAnswer(self.model, self.known)]
        if "labels" not in row:
            return []
        self._anatomy = Anatomy(self.model)
        return [self._anatomy]

    def compile_net(self, graphs: bool = False) -> None:
        """Compiles nothing: other matrices are replaced by masked ones in each pass, and each
        choice would be another graph.
        """

    @property
    def _width(self) -> int:
        """The number of sources of an input, see adversary.py."""
        return self.model.total + self.whole * len(self.model.names)

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        inputs = batch["inputs"]
        return (
            (inputs, batch.get("documents"))
            if self.model.predicts_tokens
            else (inputs.to(self.model.dtype), None)
        )

    def _rows_to_compute(self, inputs: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Returns the indices of the rows to compute, and how many rows each stands for; None: all
        rows, each for itself.

        If all matrices read zeros in a row, masks do not change its outputs, so its error is 0, and
        its gates are those of all such rows. One of them is computed for all. Not on a GPU, which
        would have to wait until the host knows their number.
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
        repeats = widen(torch.ones(len(full) + 1, dtype=inputs[0].dtype))
        repeats[-1] = len(none)
        return torch.cat((full, none[:1])), repeats

    def _reconstruction(
        self, examples: _Examples, ctx: Context, carry: Carry
    ) -> tuple[dict[str, Tensor], Carry]:
        """Returns the losses that compare masked nets with the target, each with draws of its own,
        and the carry.
        """
        asked = {
            name: self.samples if name in ("stochastic", "hidden") else 1
            for name in DRAWN
            if self.coefficients[name]
        }
        sources = ctx.noise.uniform(
            "masks", examples.shape(sum(asked.values()), self._width), examples.rows
        ).to(examples.gates.dtype)
        drawn = zip(asked, sources.split(list(asked.values()), dim=1), strict=True)
        parts = {
            name: Masks.between(examples.gates, self._sample(each))
            for name, each in drawn
            if name != "adversarial"
        } | self._fixed_masks(examples)
        for name in ("subset", "masked_subset"):
            if name in parts:
                parts[name] = route(
                    parts[name],
                    self.model,
                    ctx.noise,
                    examples.batch,
                    examples.rows,
                    self.subset_probability,
                    name.replace("_", " "),
                )
        if "adversarial" in asked:
            worst = self._worst_sources(examples, sources[:, -1:], ctx, carry)
            parts["adversarial"] = self._masks_from(examples, examples.gates, worst)
            carry = {"sources": worst.float()} if carry is not None else None
        hidden = parts.pop("hidden", None)
        terms = self._output_losses(examples, parts)
        if hidden is not None:
            changes = hidden_errors(
                self.model, examples.x, examples.documents, examples.inputs, hidden
            )
            terms["hidden"] = torch.stack([change.sum() for change in changes]).mean()
        return terms, carry

    def _fixed_masks(self, examples: _Examples) -> dict[str, Masks]:
        """Returns the masks of losses that draw none: ones or gates, without remainders."""
        gates = Masks(examples.gates.unsqueeze(1))
        parts = {"unmasked": Masks(torch.ones_like(gates.components))}
        parts |= dict.fromkeys(("masked", "masked_layerwise", "masked_subset"), gates)
        return {name: part for name, part in parts.items() if self.coefficients[name]}

    def _output_losses(self, examples: _Examples, parts: dict[str, Masks]) -> dict[str, Tensor]:
        """Returns the error of the outputs under each loss's masks, as a mean over its passes."""
        alone = {name: parts.pop(name) for name in ONE_AT_A_TIME if name in parts}
        together = (
            concat(list(parts.values())) if parts else Masks(examples.gates.unsqueeze(1)[:, :0])
        )
        passes = iter(
            errors(
                self.model,
                examples.x,
                examples.documents,
                examples.target_out,
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

    def _sample(self, sources: Tensor) -> Tensor:
        """Returns draws as they are or, with `sampling=binomial`, rounded to 0 or 1 for components;
        those of remainders stay as they are.
        """
        if not self.binomial:
            return sources
        components, rest = sources.split([self.model.total, self._width - self.model.total], -1)
        return torch.cat([(components >= 0.5).to(sources.dtype), rest], -1)

    def _worst_sources(
        self, examples: _Examples, drawn: Tensor, ctx: Context, carry: Carry
    ) -> Tensor:
        """Returns the sources of the masks with the largest error that ascent finds."""
        if self.adversary.shared:
            return self._shared_sources(examples, ctx)
        sources = self.adversary.initial_sources(drawn, ctx.noise)
        if carry is not None:
            sources = torch.where(carry["sources"] < 0, sources, carry["sources"].to(drawn.dtype))
        return self.adversary.ascend(
            sources, partial(self._total_error, examples), self.adversary.steps
        )

    def _shared_sources(self, examples: _Examples, ctx: Context) -> Tensor:
        """Returns the sources that all rows share, after the steps whose sums are known."""
        like = examples.gates.new_empty((1, 1, *examples.gates.shape[1:-1], self._width))
        return self.adversary.ascend_along(
            self.adversary.initial_sources(like, ctx.noise), ctx.totals
        )

    def _total_error(self, examples: _Examples, sources: Tensor) -> Tensor:
        """Returns the error under these sources, summed over rows."""
        masks = self._masks_from(examples, examples.gates.detach(), sources)
        (error,) = errors(
            self.model, examples.x, examples.documents, examples.target_out, masks, self._error
        )
        return (error if examples.counted is None else error * examples.counted).sum()

    def _masks_from(self, examples: _Examples, gates: Tensor, sources: Tensor) -> Masks:
        """Returns the masks of gates [B, …, K] and sources, which rows may share."""
        shape = (len(gates), 1, *gates.shape[1:-1], sources.shape[-1])
        return Masks.between(gates, sources.expand(shape))

    def _error(self, out: Tensor, target_out: Tensor) -> Tensor:
        """Returns the error of each row. Where only the ends of texts count, an end stands for all
        positions of its text, so that means over positions are means over texts.
        """
        if not self.last_alone:
            return self._row_errors(out, target_out)
        length = out.shape[-2]
        ends = self._row_errors(out[..., -1:, :], target_out[..., -1:, :])
        return F.pad(length * ends, (length - 1, 0))

    def _row_errors(self, out: Tensor, target_out: Tensor) -> Tensor:
        out = widen(out)
        if not self.kl:
            return (out - target_out).square().mean(-1)
        return F.kl_div(
            out.log_softmax(-1), target_out.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)

    def _faithfulness(self) -> Tensor:
        """Returns the mean square of what is left of the matrices without their components."""
        remainders = self.model.remainders()
        return torch.stack([each.square().sum() for each in remainders]).sum() / sum(
            each.numel() for each in remainders
        )

    def _importance(self, gates: Tensor, repeats: Tensor | None, ctx: Context) -> Tensor:
        """Returns the importance of each component [K]: its gate to the power of p, summed over
        rows.
        """
        length = max(EPS, self.p_until - self.p_from)
        done = min(1.0, max(0.0, (ctx.progress - self.p_from) / length))
        p = self.p + (self.p_end - self.p) * done
        gates = self.model.upper_gates(gates).flatten(0, -2)
        gates = gates if p == 1 else (gates + EPS).pow(p)
        return gates.sum(0) if repeats is None else repeats @ gates

    def _minimality(self, gates: Tensor, repeats: Tensor | None, ctx: Context) -> Tensor:
        importance_K = self._importance(gates, repeats, ctx)
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
    """The rows of a batch to compute, with the target's outputs and gates; `rows` are their indices
    in the batch if they are not all.
    """

    x: Tensor
    documents: Tensor | None
    target_out: Tensor
    gates: Tensor
    rows: Tensor | None
    batch: int
    inputs: Sequence[Tensor]  # of each matrix
    repeats: Tensor | None = None  # how many rows each stands for, if not for itself alone
    counted: Tensor | None = None  # in evaluations: padding does not count

    def shape(self, passes: int, width: int) -> tuple[int, ...]:
        """Returns the shape of draws for the whole batch."""
        return (self.batch, passes, *self.gates.shape[1:-1], width)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        widen(logits).flatten(0, -2), labels.long().flatten(), ignore_index=IGNORE, reduction="sum"
    )
