"""Baselines that replace a passage, and how well a frozen model predicts after each."""

# B batch, L positions of a passage, P of a prefix, T of a text, M latents, W numbers of a latent,
# D width of a reader, V its vocabulary, H heads of keys, G queries that share one, Q queries

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from contract import IGNORE, Batch
from models.latent.encoder import mean_of_pieces
from models.latent.prefix import Prefix, causal, positions
from models.layers import Past, widen
from utils.transfer import wide

LOOKING = 8  # the last queries of a passage, which choose the keys that are kept

# by name, in the order of tables
WAYS = {
    "latents": "latents",
    "other": "another passage's latents",
    "none": "nothing",
    "last": "the last tokens",
    "mean": "means of the embeddings of equal pieces",
    "surprising": "the tokens that the reader finds least likely",
    "kv_last": "keys and values of the last tokens",
    "kv_seen": "keys and values that the last queries attend to",
    "last_bytes": "the last tokens, in as many bytes",
    "kv_numbers": "keys and values as attended to, in as many numbers",
    "whole": "the whole passage",
}


def scores_after(
    model: Prefix, number: int, batch: Batch, z_BMW: Tensor, other_BMW: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns, for each replacement, the nats of each text after it, and the tokens that are right
    [B, 2]; and the likeliest tokens after the latents [B, T].
    """
    where = model.device_of(number)
    passage_BL, text_BT, labels_BT = (
        batch[f"{name}_{number}"].to(where) for name in ("passage", "text", "labels")
    )
    found: dict[str, Tensor] = {}
    # three kinds: latents, vectors in place of tokens, and keys and values of the passage
    for name, latents_BMW in (("latents", z_BMW), ("other", other_BMW)):
        prefix, added = model.prefix(number, latents_BMW)
        logits = model.logits(number, prefix, text_BT, added)
        found[name] = scores(logits, labels_BT)
        if name == "latents":
            said_BT = logits.argmax(-1)
    for name, (prefix, seen) in _streams(model, number, passage_BL).items():
        logits = model.logits(number, prefix, text_BT, None, seen)
        found[name] = scores(logits, labels_BT)
    for name, past, seen_BP in _kept(model, number, passage_BL):
        logits = _after_kept(model, number, past, seen_BP, passage_BL, text_BT)
        found[name] = scores(logits, labels_BT)
    return found, said_BT


def nats(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Sums the cross entropy of each row [B]."""
    return F.cross_entropy(
        logits_BTV.mT, labels_BT.long(), ignore_index=IGNORE, reduction="none"
    ).sum(1)


def scores(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Returns the nats of each row, and the tokens that are likeliest and right [B, 2]."""
    right_B = (logits_BTV.argmax(-1) == labels_BT).sum(1)
    return torch.stack((wide(nats(logits_BTV, labels_BT)), wide(right_B)), 1)


def whole(model: Prefix, number: int, passage_BL: Tensor, text_BT: Tensor) -> Tensor:
    """Returns a reader's scores after the whole passage."""
    embedded = model.net(number).embed(passage_BL.clamp_min(0))
    return model.logits(number, embedded, text_BT, None, passage_BL >= 0)


def _streams(model: Prefix, number: int, passage_BL: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Vectors that a reader reads like tokens, and which of them are there."""
    # baselines get as many positions as there are latents, or as many bytes
    net, seen_BL = model.net(number), passage_BL >= 0
    embedded_BLD = net.embed(passage_BL.clamp_min(0))
    places = model.places(passage_BL)
    in_as_many_bytes = model.sent_bytes // 2  # a token takes two
    pieces_PL = mean_of_pieces(passage_BL.shape[1], places).to(embedded_BLD)
    # the tokens that are least likely after those before them, in their order
    logits_BLV = net.logits(model.read_tokens(number, passage_BL)[:, :-1])
    unlikely_BL = F.cross_entropy(
        logits_BLV.mT, passage_BL[:, 1:].clamp_min(0).long(), reduction="none"
    )
    unlikely_BL = F.pad(unlikely_BL.masked_fill(~seen_BL[:, :-1], -1.0), (1, 0), value=-1.0)
    chosen_BP = unlikely_BL.topk(places, 1).indices.sort(1).values
    # each way's vectors, and which of them are not padding
    return {
        "none": (embedded_BLD[:, :0], seen_BL[:, :0]),
        "last": (embedded_BLD[:, -places:], seen_BL[:, -places:]),
        "last_bytes": (embedded_BLD[:, -in_as_many_bytes:], seen_BL[:, -in_as_many_bytes:]),
        "mean": (pieces_PL @ embedded_BLD, seen_BL.new_ones(len(seen_BL), places)),
        "surprising": (
            embedded_BLD.take_along_dim(chosen_BP[..., None], 1),
            seen_BL.take_along_dim(chosen_BP, 1),
        ),
        "whole": (embedded_BLD, seen_BL),
    }


def _kept(
    model: Prefix, number: int, passage_BL: Tensor
) -> Iterator[tuple[str, list[Past], Tensor]]:
    """Yields keys and values of the passage that are kept, by layer: those of the last tokens, and
    in each head those that the last queries attend to most (SnapKV, arXiv 2404.14469). The token
    that begins every text is also kept.
    """
    # how many positions are kept: as many as latents, or as many numbers as latents have
    net, passage_BL = model.net(number), model.begun(number, passage_BL)
    shape, places, seen_BL = net.shape, model.places(passage_BL), passage_BL >= 0
    of_position = shape.num_layers * 2 * shape.keys * shape.head_width  # numbers
    as_many = max(1, model.keys.latents * model.keys.wire // of_position)
    sizes = {"kv_last": places, "kv_seen": places, "kv_numbers": as_many}
    kept = {name: list[Past]() for name in sizes}
    # in every row and head: the first position, if it is to be kept in any case
    has_begin = model.reader_specs[number].begin_token is not None
    first_BH = (~seen_BL).sum(1)[:, None, None].expand(-1, shape.keys, int(has_begin))
    # positions are kept by rank: here the later ones, below those with the most attention
    late_BHL = torch.arange(seen_BL.shape[1], device=seen_BL.device).float()
    late_BHL = late_BHL.masked_fill(~seen_BL, -1.0)[:, None].expand(-1, shape.keys, -1)
    where = positions(seen_BL)
    cos_sin = tuple(table[where].unsqueeze(1) for table in net.rotary_emb())
    x_BLD, sees = net.embed(passage_BL.clamp_min(0)), causal(seen_BL)
    # read the passage layer by layer, and keep each layer's choice before going on
    for block in net.blocks:
        query, key, value = block.self_attn.heads_of(block.attn_norm(x_BLD), cos_sin)
        # attention of the last queries to each key, summed over them and the queries that share it
        looking = query[:, :, -LOOKING:].unflatten(1, (shape.keys, -1))
        scores_BHGQL = widen(looking @ key.unsqueeze(2).mT) * shape.head_width**-0.5
        hidden = ~sees[:, :, None, -LOOKING:]
        looks_BHL = scores_BHGQL.masked_fill(hidden, -torch.inf).softmax(-1).sum((2, 3))
        for name, size in sizes.items():
            ranked_BHL = (late_BHL if name == "kv_last" else looks_BHL).scatter(2, first_BH, -1.0)
            chosen = torch.cat((first_BH, ranked_BHL.topk(size, -1).indices), 2)[..., None]
            kept[name].append(Past(key.take_along_dim(chosen, 2), value.take_along_dim(chosen, 2)))
        x_BLD = block(x_BLD, cos_sin, False, sees)
    for name, size in sizes.items():
        # of a passage that is shorter, padding was chosen after all that is there
        there_B1 = seen_BL.sum(1, keepdim=True)
        seen_BP = torch.arange(size + has_begin, device=seen_BL.device) < there_B1
        yield name, kept[name], seen_BP


def _after_kept(
    model: Prefix,
    number: int,
    past: list[Past],
    seen_BP: Tensor,
    passage_BL: Tensor,
    text_BT: Tensor,
) -> Tensor:
    """Returns scores of a text that follows the whole passage and sees what is kept of it."""
    net, length = model.net(number), text_BT.shape[1]
    # the text sees what is kept and itself, and its positions follow those of the whole passage
    before = seen_BP[:, None, None].expand(-1, 1, length, -1)
    among = before.new_ones(length, length).tril().expand(len(text_BT), 1, -1, -1)
    read_B1 = (model.begun(number, passage_BL) >= 0).sum(1, keepdim=True)
    places = read_B1 + torch.arange(length, device=text_BT.device)
    sees = torch.cat((before, among), -1)
    return net.logits(net.read(net.embed(text_BT.clamp_min(0)), sees, places, past))
