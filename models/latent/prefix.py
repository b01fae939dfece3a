"""Frozen language models that read latents in place of the tokens of a passage: one encoder makes
the latents, and an adapter for each model turns them into what it reads.
"""

# B batch, L positions of a passage, P of a prefix, T of a text, M latents, W numbers of a latent, D
# width of a reader, V its vocabulary

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from contract import IGNORE, Batch
from models.language.targets import GPT, load_frozen
from models.latent.encoder import Adapter, Encoder, EncoderKeys, as_sent, bytes_sent
from models.layers import ForwardDtype, Past, Width, parse_dtype
from utils.command.marks import A_RUN, MAY_CHANGE, SAME_RUN, Keys
from utils.errors import ConfigError


class PrefixKeys(Keys):
    """The keys under `arch`."""

    readers: Annotated[list[str], A_RUN, MAY_CHANGE]
    """The frozen models"""

    latents: PositiveInt
    """Vectors for each passage"""

    wire: Width
    """Numbers in each vector"""

    send: Literal["float16", "int8"]
    """How numbers are sent, also in training"""

    encoder: EncoderKeys
    deep: bool
    """Adapters also add to the keys and values of each layer of their model"""

    devices: Annotated[PositiveInt, SAME_RUN]
    """GPUs of a rank at most: readers are spread over those that no rank of its host uses"""

    forward_dtype: ForwardDtype


class Prefix(nn.Module):
    """The encoder and the adapters, which train, and the frozen models."""

    def __init__(self, spec: Any, keys: PrefixKeys) -> None:
        super().__init__()
        self.dtype = parse_dtype(keys.forward_dtype)
        self.keys, self.vocab_size, self.passage_len = keys, spec.vocab_size, spec.seq_len
        if not keys.readers:
            raise ConfigError(
                "arch.readers=[]: must name at least one model; give folders of runs, or arguments"
                " of runs, as in 'arch.readers=[experiment=latent_reader]'"
            )
        if keys.latents > spec.seq_len:
            raise ConfigError(
                f"arch.latents={keys.latents}: must not exceed data.passage_len={spec.seq_len}"
            )
        self.reader_specs = spec.readers
        self.readers = nn.ModuleList()
        for number, (path, told) in enumerate(zip(keys.readers, spec.readers, strict=True)):
            # a reader's context holds the latents, too
            room = replace(told, seq_len=told.seq_len + keys.latents)
            which, key = "only nets of arch=gpt read latents", f"arch.readers[{number}]"
            reader = load_frozen(path, room, keys.forward_dtype, (GPT,), which, key)
            # frozen weights are only read: cast them once instead of in every pass
            if self.dtype.itemsize == 2:
                for parameter in reader.parameters():
                    parameter.data = parameter.data.to(self.dtype)
            self.readers.append(reader)
        states = self.net(0).shape.hidden_size if keys.encoder.states else 0
        length = spec.seq_len
        if states:  # the first reader cuts the passage into its own tokens
            length = spec.readers[0].passage_len
        self.encoder = Encoder(
            length, spec.vocab_size, states, keys.latents, keys.wire, keys.encoder
        )
        self.adapters = nn.ModuleList(
            Adapter(keys.wire, self.net(number), keys.deep) for number in range(len(keys.readers))
        )

    def net(self, number: int) -> GPT:
        net = self.readers[number].net
        assert isinstance(net, GPT)
        return net

    def device_of(self, number: int) -> torch.device:
        return self.net(number).embed_tokens.embedding_weight.device

    def operations(self) -> tuple[float, list[float]]:
        """Returns the operations on an example of what trains, and of each frozen model: two a
        weight and position forwards, as many backwards to the inputs, and to weights that train.
        """
        # the encoder trains: a forward pass, and gradients of its inputs and weights
        keys, of_encoder = self.keys, sum(p.numel() for p in self.encoder.parameters())
        trained = 6.0 * of_encoder * (self.passage_len + keys.latents)
        frozen = []
        for number, told in enumerate(self.reader_specs):
            trained += 6 * keys.latents * sum(p.numel() for p in self.adapters[number].parameters())
            weights = sum(p.numel() for p in self.readers[number].parameters())
            # a frozen reader has no gradients of its weights, but they pass through it to the
            # latents
            frozen.append(4.0 * weights * (keys.latents + told.text_len))
            if keys.encoder.states and not number:
                frozen[0] += 2.0 * weights * told.passage_len
        return trained, frozen

    @property
    def sent_bytes(self) -> int:
        return bytes_sent(self.keys.latents, self.keys.wire, self.keys.send)

    def places(self, passage_BL: Tensor) -> int:
        """The number of positions that latents take in a reader, at most those of the passage."""
        return min(self.keys.latents, passage_BL.shape[1])

    def forward(self, batch: Batch) -> Tensor:
        """Returns the latents of each passage, as they arrive [B, M, W]."""
        return as_sent(self.encoded(batch), self.keys.send)

    def encoded(self, batch: Batch) -> Tensor:
        """Returns the latents of each passage before they are sent [B, M, W]."""
        if not self.keys.encoder.states:
            return self.encoder(batch["passage"], None, self.dtype)
        # the first reader's states of the passage, without gradients, as it is frozen
        passage_BL = batch["passage_0"].to(self.device_of(0))
        seen_BL = passage_BL >= 0
        with torch.no_grad():
            states_BLD = self.read_tokens(0, passage_BL) * seen_BL[..., None]
        where = batch["passage"].device
        return self.encoder(states_BLD.to(where), seen_BL.to(where), self.dtype)

    @property
    def mark(self) -> Tensor:
        """Returns a hash of the encoder's weights, by which latents know their own adapters [1]."""
        total = hashlib.sha256()
        for tensor in self.encoder.state_dict().values():
            total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return torch.tensor([int.from_bytes(total.digest()[:8], "big", signed=True)])

    def read_tokens(self, number: int, tokens_BL: Tensor) -> Tensor:
        """Returns a reader's states in tokens that are padded on the left [B, L, D]."""
        net, begun_BL = self.net(number), self.begun(number, tokens_BL)
        seen_BL = begun_BL >= 0
        x_BLD = net.embed(begun_BL.clamp_min(0))
        return net.read(x_BLD, causal(seen_BL), positions(seen_BL))[:, -tokens_BL.shape[1] :]

    def begun(self, number: int, tokens_BL: Tensor) -> Tensor:
        """Puts a reader's begin token, if it expects one, before tokens padded on the left."""
        begin = self.reader_specs[number].begin_token
        if begin is None:
            return tokens_BL
        tokens_BL = F.pad(tokens_BL, (1, 0), value=IGNORE)
        last_hidden_B1 = (tokens_BL < 0).sum(1, keepdim=True) - 1
        return tokens_BL.scatter(1, last_hidden_B1, begin)

    def prefix(self, number: int, z_BMW: Tensor) -> tuple[Tensor, Sequence[Past] | None]:
        """Returns what a reader reads in place of a passage: vectors [B, M, D], and what is added
        to its layers.
        """
        has_begin = self.reader_specs[number].begin_token is not None
        return self.adapters[number](z_BMW.to(self.dtype), int(has_begin), self.device_of(number))

    def logits(
        self,
        number: int,
        prefix_BPD: Tensor,
        text_BT: Tensor,
        added: Sequence[Past] | None = None,
        seen_BP: Tensor | None = None,
    ) -> Tensor:
        """Returns a reader's scores of what follows each token of a text [B, T, V], which is padded
        on the right, behind a prefix. `seen_BP`: which of the prefix is there; the left may not be.
        """
        net, begin = self.net(number), self.reader_specs[number].begin_token
        # begin token, prefix, text: what the reader sees
        stream = [prefix_BPD, net.embed(text_BT.clamp_min(0))]
        if begin is not None:
            stream.insert(0, net.embed(text_BT.new_full((len(text_BT), 1), begin)))
        x_BLD = torch.cat(stream, 1)
        sees = places = None
        # padding before the passage must neither be seen nor count as positions
        if seen_BP is not None:
            seen_BL = seen_BP.new_ones(x_BLD.shape[:2])
            first = x_BLD.shape[1] - text_BT.shape[1] - seen_BP.shape[1]
            seen_BL[:, first : first + seen_BP.shape[1]] = seen_BP
            sees, places = causal(seen_BL), positions(seen_BL)
        states_BLD = net.read(x_BLD, sees, places, added)
        return net.logits(states_BLD[:, -text_BT.shape[1] :])


def causal(seen_BL: Tensor) -> Tensor:
    """Returns what each position sees [B, 1, L, L]: itself, and those before it that are there."""
    length = seen_BL.shape[1]
    sees_LL = seen_BL.new_ones(length, length).tril()
    itself_LL = torch.eye(length, dtype=torch.bool, device=seen_BL.device)
    return (sees_LL & seen_BL[:, None] | itself_LL)[:, None]


def positions(seen_BL: Tensor) -> Tensor:
    """Counts positions from the first that is there."""
    return (seen_BL.cumsum(1) - 1).clamp_min(0)
