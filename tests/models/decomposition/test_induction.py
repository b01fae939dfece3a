"""The net of the induction-head task against its formula."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from contract import IGNORE, Context, Noise, Spec
from models.decomposition.induction import sinusoids
from tests.making import make_objective


def made(**keys: Any) -> Any:
    return make_objective("induction", Spec(vocab_size=7, seq_len=5), **{"hidden_size": 4, **keys})


def test_a_layer_is_attention_whose_values_know_no_positions() -> None:
    net = made(num_heads=2, num_layers=1, forward_dtype="float64").model
    tokens = torch.tensor([[0, 3, 6, 2, 6]])
    x, layer = net.embed_tokens.embedding_weight[tokens[0]], net.layers[0]
    q, k, v = (x @ each.weight.t() for each in (layer.q_proj, layer.k_proj, layer.v_proj))
    positions = sinusoids(5, 4)
    assert positions[2].tolist() == pytest.approx(
        [math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)]
    )
    q, k = q + positions, k + positions
    rows = []
    for place in range(5):
        heads = []
        for head in (slice(0, 2), slice(2, 4)):
            scores = k[: place + 1, head] @ q[place, head] / math.sqrt(2)
            heads.append(scores.softmax(0) @ v[: place + 1, head])
        rows.append(torch.cat(heads))
    hidden = x + torch.stack(rows) @ layer.o_proj.weight.t()
    assert_close(net(tokens)[0], hidden)
    assert_close(net.logits(net(tokens))[0], hidden @ net.lm_head.weight.t())


def test_the_last_tokens_answer_is_what_counts() -> None:
    objective = made()
    net = objective.model
    tokens, answer = torch.randint(7, (3, 5)), torch.tensor([1, 2, 3])
    logs = net.logits(net(tokens))[:, -1].log_softmax(-1)
    nats = -logs[[0, 1, 2], answer]
    out = objective({"inputs": tokens, "answer": answer}, None, Context(0.0, Noise(0, 0, [0])))
    assert_close(out.loss, nats.sum())
    labels = torch.zeros(3, 5)
    labels[2] = IGNORE  # padding
    likeliest = {"inputs": tokens, "answer": logs.argmax(-1), "labels": labels}
    assert objective.predict(likeliest).metrics["accuracy"] == (2, 2)
    found = objective.predict({"inputs": tokens, "answer": answer, "labels": labels}).metrics
    assert_close(found["loss"][0], nats[:2].sum())
