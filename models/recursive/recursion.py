"""The keys, the states and the thinking step that all recursive nets share."""

# B batch, L positions (puzzle prefix + tokens), T tokens, D width, V vocabulary, P puzzle
# width; z_H and z_L are states

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.func import functional_call

from contract import Noise
from models.layers import CosSin, ForwardDtype, Layers, Width, cast_weights, parse_dtype
from models.sparse_embedding import SparseEmbedding
from utils.command.marks import SAME_RUN, Fraction, Keys
from utils.errors import ConfigError

EPS = 1e-5  # in norms, as published
State = tuple[Tensor, ...]  # of HRM and TRM: z_H and z_L, both [B, L, D]


class Sizes(Keys):
    """The keys under `arch` of all recursive nets, named as users of HRM and TRM know them."""

    H_cycles: Annotated[int, Field(ge=1, le=1000)]
    L_cycles: Annotated[int, Field(ge=1, le=1000)]
    L_layers: Layers
    hidden_size: Width
    expansion: PositiveFloat
    """Width of the MLPs, as a multiple of hidden_size"""
    halt_max_steps: Annotated[int, Field(ge=1, le=10000)]
    """Most thinking steps on one puzzle"""
    halt_exploration_prob: Fraction
    """Probability, in each training step, that a slot must have thought for a random number of
    steps before it may halt
    """
    forward_dtype: ForwardDtype
    mlp_multiple: PositiveInt
    """The width of the gated MLPs is rounded up to a multiple of this"""
    mlp_norm: bool
    """Normalises the gated activations of the MLPs, for optim=muon"""
    eval_halt: Annotated[bool, SAME_RUN]
    """Evaluations leave a puzzle once the net wants to halt and its answer has settled, not after
    all steps
    """
    random_start: bool
    """Each puzzle begins in its own states, drawn at random"""
    damping: Annotated[float, Field(ge=0, lt=1)]
    """Share of its old state that each pass through the blocks keeps"""
    path_noise: NonNegativeFloat
    """Standard deviation of the noise after each pass in training"""
    eval_noise: Annotated[NonNegativeFloat, SAME_RUN]
    """The same for evaluations"""
    chains: Annotated[PositiveInt, SAME_RUN]
    """Chains of thought about each puzzle in an evaluation, which differ by noise or start"""
    judge: Annotated[Literal["halting", "residual"], SAME_RUN]
    """The chain that answers: that with the highest halting logit, or that whose state has changed
    least in the last step
    """
    no_ACT_continue: bool
    """Halts by the sign of one logit; false: by HRM's two Q values"""

    def check(self) -> None:
        """Raises ConfigError for keys that do not go together."""
        if self.chains > 1 and not (self.random_start or self.eval_noise):
            raise ConfigError(
                f"arch.chains={self.chains}: all of them would compute the same; give"
                " arch.eval_noise=0.3, or train with arch.random_start=true"
            )


class Level(nn.Module):
    """A stack of blocks that is applied again and again, each time to its state plus an input."""

    def __init__(self, blocks: list[nn.Module], damping: float = 0.0) -> None:
        super().__init__()
        self.layers, self.damping = nn.ModuleList(blocks), damping

    def forward(
        self,
        state: Tensor,
        injected: Tensor,
        cos_sin: CosSin | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        x = state + injected
        for block in self.layers:
            x = block(x) if cos_sin is None else block(x, cos_sin)
        if self.damping:
            x = self.damping * state + (1 - self.damping) * x  # lerp rounds otherwise than EqR
        return x if noise is None else x + noise


class Inner(nn.Module):
    """The net itself. Puzzle rows are passed in, as their table is sparse."""

    puzzle_emb: SparseEmbedding | None

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        sizes.check()
        self.sizes = sizes
        self.puzzle_emb = None

    @property
    def passes(self) -> int:
        """The number of passes in a thinking step; 0: of a kind without damping and noise."""
        return 0

    def starts(self) -> dict[str, Tensor]:
        """Returns the numbers [D] that each state begins with at every position, by its name."""
        raise NotImplementedError

    def state_shape(self, slots: int, tokens: int) -> tuple[int, ...]:
        """Returns the shape of each state of some puzzles."""
        raise NotImplementedError

    def forward(
        self,
        state: State,
        tokens_BT: Tensor,
        puzzle_BP: Tensor | None,
        noise: Sequence[Tensor] = (),
    ) -> tuple[State, Tensor, Tensor]:
        """Does one thinking step, with noise after each pass if there is any. Returns the new
        state, without gradients, the logits of each token, and two halting logits.
        """
        raise NotImplementedError


class RecursiveNet(nn.Module):
    """Wraps the inner net: casts its weights, and makes initial states and steps of reasoning.

    Compiled code casts them, too: a CUDA graph reads its inputs where they were when it was
    recorded, and weights cast outside would lie elsewhere in each step.
    """

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.inner = inner
        self.sizes = sizes = inner.sizes
        # a key that has no effect is a mistake: say so
        if not inner.passes and (sizes.damping or sizes.path_noise or sizes.eval_noise):
            raise ConfigError(
                "arch.damping, arch.path_noise and arch.eval_noise act on passes through blocks,"
                " which this net does not have; leave them at 0"
            )
        self.compiled = False

    def compile(self, **options) -> None:  # type: ignore[override]
        self.compiled = True
        super().compile(**options)

    @property
    def dtype(self) -> torch.dtype:
        return parse_dtype(self.sizes.forward_dtype)

    def fresh_state(self, noise: Noise, slots: int, tokens: int) -> State:
        """Returns the initial state: drawn with `random_start`, else the same for every slot."""
        # random starts teach a net to reach its answer from any state, and make chains differ
        shape, starts = self.inner.state_shape(slots, tokens), self.inner.starts()
        if self.sizes.random_start:
            drawn = (noise.truncated_normal(f"start of {name}", shape) for name in starts)
            return tuple(z.to(self.dtype) for z in drawn)
        return tuple(start.to(self.dtype).expand(shape) for start in starts.values())

    def path_noise(self, noise: Noise, state: State, std: float) -> Sequence[Tensor]:
        """Returns noise of a standard deviation for each pass of a thinking step, with which a path
        leaves the basin of a wrong answer; none if the deviation is 0.
        """
        # drawn outside the compiled net; all passes together take the memory of as many states
        passes, (z, *_) = range(self.inner.passes if std else 0), state
        return [(std * noise.normal(f"pass {i}", z.shape)).to(z.dtype) for i in passes]

    def puzzle_rows(self, ids_B: Tensor) -> Tensor | None:
        """Returns this step's rows of the puzzle table, in the forward dtype."""
        table = self.inner.puzzle_emb
        return None if table is None else table(ids_B).to(self.dtype)

    def forward(
        self,
        state: State,
        tokens_BT: Tensor,
        rows_BP: Tensor | None,
        noise: Sequence[Tensor] = (),
    ) -> tuple[State, Tensor, Tensor]:
        """Does one step of reasoning: returns the new state, token logits and halting logits."""
        # cast once here: a step uses each weight many times
        arguments = (state, tokens_BT, rows_BP, noise)
        if self.dtype == next(self.inner.parameters()).dtype:
            return self.inner(*arguments)
        return functional_call(self.inner, cast_weights(self.inner, self.dtype), arguments)

    def wants_to_halt(self, q_B2: Tensor) -> Tensor:
        """Returns which slots want to halt: in TRM if the halting logit is positive, in HRM if it
        is above the logit of continuing.
        """
        return self.halting_margin(q_B2) > 0

    def halting_margin(self, q_B2: Tensor) -> Tensor:
        """Returns by how much a slot's wish to halt exceeds that to continue."""
        return q_B2[:, 0] - (0.0 if self.sizes.no_ACT_continue else q_B2[:, 1])


def where_slots(slots_B: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Returns the new rows for the given slots, and the old ones for all others."""
    return torch.where(slots_B.view(-1, *[1] * (new.ndim - 1)), new, old)
