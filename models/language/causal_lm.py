"""Language models: the cross entropy of the next token, and continuations."""

# B batch, L positions, D width, V vocabulary, N tokens of a piece

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import Doc

from contract import (
    IGNORE,
    Batch,
    Carry,
    Context,
    Objective,
    Prediction,
    StepOut,
)
from models.language import llama
from models.language.gpt import GPT
from models.layers import Past
from utils.command.marks import Fraction


class CausalLM(Objective):
    """Sums the cross entropy over tokens. Bits per byte compare nets with different tokenizers.

    With `z_loss`, training also keeps the softmax's denominators near 1, so that logits do not
    drift (Chowdhery et al. 2022, section 5); evaluations do not count it.
    """

    costs = frozenset({"loss", "bpb"})
    model: GPT
    bytes_V: Tensor

    def __init__(
        self,
        model: GPT,
        chunk_tokens: Annotated[
            PositiveInt | None,
            Doc("computes the logits of at most so many tokens at once; null: of all"),
        ],
        z_loss: Annotated[
            Fraction,
            Doc(
                "coefficient of the squared log of the softmax's denominator in the training "
                "loss; PaLM: 1e-4"
            ),
        ],
    ) -> None:
        super().__init__(model)
        self.z_loss = z_loss
        self.headline = "bpb" if model.token_bytes else "loss"
        self.chunk_tokens = chunk_tokens
        self.register_buffer(
            "bytes_V", torch.tensor(model.token_bytes, dtype=torch.int64), persistent=False
        )
        self._piece: Callable[[Tensor, Tensor], Tensor] = self._cross_entropy

    def forward(self, batch: Batch, carry: Carry, ctx: Context) -> StepOut:
        return StepOut(*self.score(batch))

    def predict(self, batch: Batch) -> Prediction:
        """Scores a text; or continues a prompt, if the batch has room for a continuation."""
        if "continuation" in batch:
            return Prediction({}, {"continuation": self.continue_prompts(batch)})
        return Prediction(self.score(batch)[2])

    def continue_prompts(self, batch: Batch) -> Tensor:
        """Continues prompts, padded on the right where the batch has their lengths."""
        if "prompt_length" not in batch:
            return self.continue_prompt(batch)
        made_BL = torch.zeros_like(batch["continuation"])
        for length in batch["prompt_length"].unique().tolist():
            alike_B = batch["prompt_length"] == length
            rows = {name: tensor[alike_B] for name, tensor in batch.items()}
            rows["inputs"] = rows["inputs"][:, :length]
            made_BL[alike_B] = self.continue_prompt(rows)
        return made_BL

    def continue_prompt(self, batch: Batch) -> Tensor:
        """Continues a prompt token by token.

        Takes the likeliest token at temperature 0, else draws one of the `top_k` likeliest (0: of
        all). When the context is full, its later half becomes the prompt of a new one.
        """
        tokens_BL, room = batch["inputs"].long(), self.model.seq_len
        tokens_BL, length = tokens_BL[:, -room:], batch["continuation"].shape[1]
        draw = torch.Generator().manual_seed(int(batch["sample_seed"][0]))
        # keys and values of what was read, so that each further token costs one position
        past = [Past() for _ in self.model.blocks]
        new, made = tokens_BL, list[Tensor]()
        for token in range(length):
            self.progress("continuing a prompt: token", token, length)
            # a net without blocks remembers nothing, so that its context is always full
            if made and (not past or past[0].length == room):
                past = [Past() for _ in past]
                new = torch.cat((tokens_BL, *made), 1)[:, -max(1, room // 2) :]
            logits_BV = self.model.next_logits(new, past)
            new = draw_tokens(logits_BV, batch["temperature"], batch["top_k"], draw)
            made.append(new)
        return torch.cat(made, 1).int() if made else batch["continuation"]

    def published(self, path: str) -> dict[str, Tensor] | None:
        """Returns the weights in a folder of Hugging Face; None for other paths."""
        folder = Path(path)
        if not (folder / "config.json").is_file():
            return None
        vocab_size = len(self.model.embed_tokens.embedding_weight)
        weights = llama.read(folder, self.model.shape, vocab_size)
        return {f"model.{name}": tensor for name, tensor in weights.items()}

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.model.blocks

    def flops_per_example(self) -> int:
        return self.model.flops_per_token() * self.model.seq_len

    def compile_net(self) -> None:
        super().compile_net()
        self._piece = torch.compile(self._cross_entropy, dynamic=False)

    def score(self, batch: Batch) -> tuple[Tensor, Tensor, Mapping[str, tuple[Tensor, Tensor]]]:
        labels_BL = batch["labels"].long()
        counted_BL = labels_BL != IGNORE
        # the net's states; the logits of all tokens would be the largest tensor of the step
        hidden_BLD = self.model(batch["inputs"], batch.get("documents"))
        sums = self._sum_cross_entropy(hidden_BLD.flatten(0, 1), labels_BL.flatten())
        loss, nats, weight = sums[0], sums[-1], counted_BL.sum()
        metrics = {"loss": (nats.detach(), weight)}
        if len(self.bytes_V):
            # the bytes of what is predicted, so that nets with other tokenizers compare
            bytes_BL = self.bytes_V[labels_BL.clamp_min(0)] * counted_BL
            metrics["bpb"] = (nats.detach() / math.log(2), bytes_BL.sum())
        if self.z_loss:
            metrics["log_z2"] = (sums[1].detach(), weight)
        return loss, weight, metrics

    def _sum_cross_entropy(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        """Sums piece by piece, so that the logits of all tokens never exist at once."""
        if self.chunk_tokens is None or len(labels_N) <= self.chunk_tokens:
            return self._piece(hidden_ND, labels_N)
        # an evaluation keeps nothing of a piece; training takes each piece's gradient at once
        pieces = hidden_ND.split(self.chunk_tokens), labels_N.split(self.chunk_tokens)
        if not torch.is_grad_enabled():
            return torch.stack([*map(self._piece, *pieces)]).sum(0)
        return Pieces.apply(self._piece, pieces[1], hidden_ND, *self.model.head.parameters())

    def _cross_entropy(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        """Returns the sum of the loss, and those that metrics report: with a z-loss that of the
        squared logs of the denominators, and that of the cross entropy.
        """
        logits_NV = self.model.logits(hidden_ND)
        nats = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE, reduction="sum")
        if not self.z_loss:
            return torch.stack([nats])
        squares_N = logits_NV.logsumexp(-1).square()
        squares = squares_N.where(labels_N != IGNORE, 0.0).sum()
        return torch.stack([nats + self.z_loss * squares, squares, nats])


class Pieces(torch.autograd.Function):
    """Sums over pieces of a batch, each with its gradient at once: logits of a piece are neither
    kept for the backward pass nor computed again in it. Only the first sum has a gradient.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        piece: Callable[[Tensor, Tensor], Tensor],
        labels: Sequence[Tensor],
        hidden_ND: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        sums, of_hidden, of_weights = [], [], [torch.zeros_like(weight) for weight in weights]
        pieces = hidden_ND.detach().split(len(labels[0]))
        # forward and backward of one piece, whose logits are freed before the next
        for hidden, labels_N in zip(pieces, labels, strict=True):
            with torch.enable_grad():
                sums_of_piece = piece(hidden.requires_grad_(), labels_N)
                grad, *grads = torch.autograd.grad(sums_of_piece[0], (hidden, *weights))
            torch._foreach_add_(of_weights, grads)
            of_hidden.append(grad)
            sums.append(sums_of_piece.detach())
        ctx.save_for_backward(torch.cat(of_hidden), *of_weights)
        return torch.stack(sums).sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, *(grad * grad_sums[0] for grad in ctx.saved_tensors)


def draw_tokens(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, draw: torch.Generator
) -> Tensor:
    """Draws one token for each row, on the CPU: the same one for every device that logits are on.

    Where logits are not finite, every token is equally likely.
    """
    rows = []
    for logits_V, temperature, top_k in zip(
        logits_BV.cpu().double(), temperature_B.tolist(), top_k_B.tolist(), strict=True
    ):
        if temperature == 0:
            rows.append(logits_V.argmax(keepdim=True))
            continue
        # equally likely tokens at the border are all kept
        if top_k:
            least = logits_V.topk(min(top_k, len(logits_V))).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
        chances_V = torch.softmax(logits_V / temperature, 0)
        if chances_V.isnan().any():  # a net that has diverged: text for show must not end its run
            chances_V = torch.ones_like(chances_V)
        rows.append(torch.multinomial(chances_V, 1, generator=draw))
    return torch.stack(rows).to(logits_BV.device)
