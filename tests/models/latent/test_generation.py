"""A frozen model reads rows of different lengths as it reads each by itself; prefixes are what
stands in their place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.language.gpt import GPT
from models.latent.generation import NO_PREFIX, answer_logits, generate
from models.layers import Past
from tests.making import make_objective
from utils.spec import Spec


def net(**keys: Any) -> GPT:
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "kv_heads": 2}
    spec = Spec(vocab_size=23, seq_len=32)
    made = make_objective("gpt", spec, forward_dtype="float64", **shape, **keys).model
    for parameter in made.parameters():
        parameter.data = parameter.data * 4
    return made.requires_grad_(False)


def padded(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


SAID = [[0, 5, 6, 7], [0, 8], [0, 9, 10, 11, 12, 13], [0]]
ANSWERS = [[14, 15], [16, 17, 18], [19], [20, 21]]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_scores_of_answers_are_those_of_each_row_by_itself(qk_norm: bool) -> None:
    reader = net(qk_norm=qk_norm)
    together = answer_logits(reader, NO_PREFIX, padded(SAID, 7), padded(ANSWERS, 4))
    for row, (said, answer) in enumerate(zip(SAID, ANSWERS, strict=True)):
        alone = reader.logits(reader(torch.tensor([said + answer])))[0, len(said) - 1 : -1]
        torch.testing.assert_close(together[row, : len(answer)], alone)


def test_the_embeddings_of_a_text_as_prefix_are_the_text() -> None:
    reader, text = net(), torch.tensor([[3, 4, 5]] * 4)
    before = reader.embed(text), []
    there = answer_logits(
        reader, NO_PREFIX, torch.cat((text, padded(SAID, 7)), 1), padded(ANSWERS, 4)
    )
    torch.testing.assert_close(
        answer_logits(reader, before, padded(SAID, 7), padded(ANSWERS, 4)), there
    )
    whole = torch.cat((text, padded(SAID, 7)), 1)
    assert (
        generate(reader, before, padded(SAID, 7), 5).tolist()
        == generate(reader, NO_PREFIX, whole, 5).tolist()
    )


def test_layers_see_what_a_deep_prefix_has() -> None:
    """Keys and values that come from a text are as if layers had seen it, but for places: here all
    turn by nothing.
    """
    reader, text = net(), torch.tensor([[3, 4, 5]] * 4)
    reader.rotary_emb.cos.fill_(1)
    reader.rotary_emb.sin.fill_(0)
    seen = [Past() for _ in reader.blocks]
    reader.read(reader.embed(text), past=seen)
    there = answer_logits(
        reader, NO_PREFIX, torch.cat((text, padded(SAID, 7)), 1), padded(ANSWERS, 4)
    )
    kept = [Past(layer.key, layer.value) for layer in seen]
    torch.testing.assert_close(
        answer_logits(reader, (None, kept), padded(SAID, 7), padded(ANSWERS, 4)), there
    )
    kept = [Past(layer.key, layer.value) for layer in seen]
    whole = torch.cat((text, padded(SAID, 7)), 1)
    assert (
        generate(reader, (None, kept), padded(SAID, 7), 5).tolist()
        == generate(reader, NO_PREFIX, whole, 5).tolist()
    )
    assert kept[0].length == 3, "answering leaves it as it is"


@pytest.mark.parametrize("deep", [False, True])
def test_one_prefix_serves_all_questions_about_its_text(deep: bool) -> None:
    reader, texts = net(), torch.tensor([[3, 4, 5], [6, 3, 2]])

    def before(rows: Tensor) -> tuple[Tensor, list[Past]]:
        seen = [Past() for _ in reader.blocks]
        reader.read(reader.embed(rows + 7), past=seen)
        return reader.embed(rows), seen if deep else []

    repeated = before(texts.repeat_interleave(2, 0))
    wanted = answer_logits(reader, repeated, padded(SAID, 7), padded(ANSWERS, 4))
    found = answer_logits(reader, before(texts), padded(SAID, 7), padded(ANSWERS, 4))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("prefix", [False, True])
def test_answers_are_the_likeliest_tokens_of_each_row_by_itself(prefix: bool) -> None:
    reader = net()
    before = (torch.randn(4, 3, 16, dtype=torch.float64), []) if prefix else NO_PREFIX
    made = generate(reader, before, padded(SAID, 9), 6)
    for row, said in enumerate(SAID):
        tokens = list(said)
        for _ in range(6):
            x = reader.embed(torch.tensor([tokens]))
            if prefix:
                x = torch.cat((before[0][row : row + 1], x), 1)
            tokens.append(int(reader.logits(reader.read(x))[0, -1].argmax()))
        assert made[row].tolist() == tokens[len(said) :]
    assert len({tuple(row) for row in made.tolist()}) == 4
