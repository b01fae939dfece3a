"""Fixed-Point Reasoning Model (Movahedi et al. 2026, arXiv 2606.18206): one state goes through the
same blocks until it changes no more.
"""

# B batch, L positions (puzzle prefix + tokens), T tokens, S side of the grid, D width

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor, nn

from contract import Spec
from models.layers import CosSin, rms_norm, widen
from models.recursive.recursion import Level, RecursiveNet, State
from models.recursive.sequence import ROPES, Block, SequenceInner, SequenceSizes
from utils.errors import ConfigError

Share = Annotated[float, Field(gt=0, lt=1)]
TINY = 1e-8


class FPRMSizes(SequenceSizes):
    fixed_point: PositiveFloat
    """It halts where no position's state changes by more than this share of it in a pass"""
    alpha_1_init: Share
    """Share of the stream that each branch of a block keeps, at first"""
    alpha_2_init: Share
    """Share of the state that each pass keeps, at first"""
    conv_kernel_size: NonNegativeInt
    """Side of the convolution over a square grid at the beginning of a pass, odd; 0: none"""


class ScaledBlock(Block):
    """Each branch reads a norm of the stream, which keeps a share of itself when it is added."""

    def forward(  # type: ignore[override]
        self, x_BLD: Tensor, cos_sin: CosSin | None, keep_D: Tensor, add_D: Tensor
    ) -> Tensor:
        if self.mixes_by_mlp:
            x_BDL = x_BLD.transpose(1, 2)
            mixed_BLD = self.mlp_t(rms_norm(x_BDL, self.eps)).transpose(1, 2)
        else:
            mixed_BLD = self.self_attn(rms_norm(x_BLD, self.eps), cos_sin)
        x_BLD = keep_D * x_BLD + add_D * mixed_BLD
        return keep_D * x_BLD + add_D * self.mlp(rms_norm(x_BLD, self.eps))


class ScaledLevel(Level):
    """A pass whose weights of state, input and branches are learned, but bound to each other, so
    that the state can settle however many blocks there are.
    """

    def __init__(self, blocks: list[nn.Module], sizes: FPRMSizes, tokens: int) -> None:
        super().__init__(blocks, sizes.damping)
        width, kernel = sizes.hidden_size, sizes.conv_kernel_size
        self.prefix, self.side = sizes.prefix, math.isqrt(tokens)
        if kernel and (kernel % 2 == 0 or self.side**2 != tokens):
            raise ConfigError(
                f"arch.conv_kernel_size={kernel} with {tokens} tokens: it must be odd, and the"
                " tokens a square grid; 0 leaves the convolution out"
            )
        self.conv = None
        if kernel:
            self.conv = nn.Conv2d(
                width, width, kernel, padding=kernel // 2, groups=width, bias=False
            )
        # logits of the shares
        self.alpha_1_param = nn.Parameter(torch.full((width,), logit(sizes.alpha_1_init)))
        self.alpha_2_param = nn.Parameter(torch.full((width,), logit(sizes.alpha_2_init)))

    def once(self, state: Tensor, injected: Tensor, cos_sin: CosSin | None) -> Tensor:
        block_D = widen(self.alpha_1_param).sigmoid().to(state.dtype)
        state_D = widen(self.alpha_2_param).sigmoid().to(state.dtype)
        kept_D = block_D ** (2 * len(self.layers))  # what is left of the stream after all branches
        input_D = 1 - state_D * kept_D
        branch_D = input_D * (1 - block_D) / (1 - kept_D + 1e-5)
        if self.conv is not None:
            before_BLD, cells_BTD = state[:, : self.prefix], state[:, self.prefix :]
            grid_BDSS = cells_BTD.transpose(1, 2).unflatten(2, (self.side, self.side))
            state = torch.cat((before_BLD, self.conv(grid_BDSS).flatten(2).transpose(1, 2)), 1)
        x_BLD = state_D * state + input_D * injected
        for block in self.layers:
            x_BLD = block(x_BLD, cos_sin, block_D, branch_D)
        return x_BLD


class FPRMInner(SequenceInner):
    """A thinking step is `L_cycles` passes in each of `H_cycles` rounds; the last round has
    gradients. Halting is not learned: the net halts at a fixed point.
    """

    sizes: FPRMSizes

    def __init__(self, sizes: FPRMSizes, spec: Spec) -> None:
        super().__init__(sizes, spec)
        del self.q_head, self.L_init
        self.level = ScaledLevel(self.blocks(sizes.L_layers, ScaledBlock), sizes, spec.seq_len)

    @property
    def passes(self) -> int:
        return self.sizes.H_cycles * self.sizes.L_cycles

    def starts(self) -> dict[str, Tensor]:
        return {"z": self.H_init}

    def forward(
        self,
        state: State,
        tokens_BT: Tensor,
        puzzle_BP: Tensor | None,
        noise: Sequence[Tensor] = (),
    ) -> tuple[State, Tensor, Tensor]:
        cos_sin = self.rotary_emb() if self.sizes.pos_encodings in ROPES else None
        (z_BLD,), x_BLD, disturbance = state, self.embed(tokens_BT, puzzle_BP), iter(noise)
        with torch.no_grad():
            for _ in range(self.passes - self.sizes.L_cycles):
                z_BLD = self.level(z_BLD, x_BLD, cos_sin, next(disturbance, None))
        for _ in range(self.sizes.L_cycles):
            before_BLD, z_BLD = z_BLD, self.level(z_BLD, x_BLD, cos_sin, next(disturbance, None))
        new_BLD = z_BLD.detach()
        return (
            (new_BLD,),
            self.lm_head(z_BLD)[:, self.sizes.prefix :],
            self.margin(before_BLD.detach(), new_BLD),
        )

    def margin(self, before_BLD: Tensor, after_BLD: Tensor) -> Tensor:
        """Returns halting logits without gradients: positive where the state has settled."""
        change_BL = (widen(after_BLD) - widen(before_BLD)).abs().amax(-1)
        change_B = (change_BL / (widen(after_BLD).abs().amax(-1) + TINY)).amax(-1)
        margin_B = (self.sizes.fixed_point / change_B.clamp_min(TINY)).log()
        return torch.stack((margin_B, torch.zeros_like(margin_B)), -1)


class FPRM(RecursiveNet):
    """One state, and a net that halts at its fixed point."""

    def __init__(self, spec: Spec, keys: FPRMSizes) -> None:
        super().__init__(FPRMInner(keys, spec))


def logit(share: float) -> float:
    return math.log(share / (1 - share))
