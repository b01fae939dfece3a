"""The net of candidates: digits are alike to it, and it knows no rule of Sudoku."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from contract import Spec
from tests.making import make_objective
from utils.errors import ConfigError

SPEC = Spec(name="boards", vocab_size=11, seq_len=81, table_rows=1)


def net(**keys: Any) -> Any:
    model = make_objective("candidates", SPEC, forward_dtype="float64", **keys).model.double()
    with torch.no_grad():
        for head in (model.inner.option_head, model.inner.value_head):  # zero at first
            head.weight.normal_()
    return model.eval()


def said(model: Any, known_BTN: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return model(model.fresh_state(len(known_BTN)), known_BTN)[1:]


def known() -> Tensor:
    return torch.randint(0, 4, (3, 81, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("keys", [{}, {"num_layers": 2, "passes": 1}])
def test_other_digits_get_the_same_answer_in_those_digits(keys: dict[str, Any]) -> None:
    model, named = net(**keys), torch.randperm(9, generator=torch.Generator().manual_seed(1))
    logits, value = said(model, known())
    of_others, value_of_others = said(model, known()[..., named])
    assert_close(of_others, logits[..., named])
    assert_close(value_of_others, value)
    assert logits.std() > 0.1, "the net says the same of all candidates: the test shows nothing"


def test_no_rule_is_wired_in() -> None:
    """Two rows of different bands swapped: to the rules another board, to the net's start none."""
    model, order = net(), torch.arange(81)
    order[0:9], order[72:81] = torch.arange(72, 81), torch.arange(0, 9)
    with torch.no_grad():
        for block in model.inner.layers:
            block.mixer.rows.fill_(0.1)
            block.mixer.columns.fill_(0.1)
    logits, value = said(model, known())
    of_swapped, value_of_swapped = said(model, known()[:, order])
    assert_close(of_swapped, logits[:, order])
    assert_close(value_of_swapped, value)


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"arch\.hidden_size=20"):
        net(hidden_size=20)
