"""The net of candidates: digits are alike to it, and it learns Sudoku's rules or knows them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from data.recursive.puzzles import PuzzleSpec
from data.recursive.sudoku_boards import cell_permutations
from models.recursive.candidates import EXCLUDED, GIVEN, GUESSED, OPEN, what_is_known
from tests.making import make_objective
from utils.errors import ConfigError


def net(side: int = 9, **keys: Any) -> Any:
    spec = PuzzleSpec(name="boards", vocab_size=side + 2, seq_len=side * side, table_rows=1)
    model = make_objective("candidates", spec, forward_dtype="float64", **keys).model.double()
    with torch.no_grad():
        for head in (model.inner.option_head, model.inner.value_head):  # zero at first
            head.weight.normal_()
    return model.eval()


def said(model: Any, known_BTN: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logits, value = model(model.fresh_state(len(known_BTN)), known_BTN)[1:]
    assert logits.std() > 0.1, "the net says the same of all candidates: the test shows nothing"
    return logits, value


def known(side: int = 9) -> Tensor:
    return torch.randint(0, 4, (3, side**2, side), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("keys", [{}, {"num_layers": 2, "passes": 1}, {"num_heads": None}])
def test_other_digits_get_the_same_answer_in_those_digits(keys: dict[str, Any]) -> None:
    model, named = net(**keys), torch.randperm(9, generator=torch.Generator().manual_seed(1))
    logits, value = said(model, known())
    of_others, value_of_others = said(model, known()[..., named])
    assert_close(of_others, logits[..., named])
    assert_close(value_of_others, value)


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


def test_with_the_rules_wired_in_answers_move_with_the_board() -> None:
    """Rows, columns, bands and stacks change places; boxes of 2 × 3 cannot be turned."""
    model, cells = net(6, num_heads=None), cell_permutations(6, 3, np.random.default_rng(0))
    boards = known(6)
    order_BT1 = torch.from_numpy(cells).long()[..., None]

    def image(of_BTN: Tensor) -> Tensor:
        return of_BTN.gather(1, order_BT1.expand_as(of_BTN))

    assert not torch.equal(image(boards), boards)
    logits, value = said(model, boards)
    of_images, value_of_images = said(model, image(boards))
    assert_close(of_images, image(logits))
    assert_close(value_of_images, value)


def test_with_the_rules_wired_in_a_board_that_is_no_image_has_other_answers() -> None:
    """Two cells swapped across boxes: the units differ, and so must what the net makes of them."""
    model, order = net(num_heads=None), torch.arange(81)
    order[[0, 80]] = order[[80, 0]]
    value, other = (said(model, of)[1] for of in (known(), known()[:, order]))
    assert ((value - other).abs() > 1e-6).all()


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"arch\.hidden_size=20"):
        net(hidden_size=20)


def test_what_is_known_of_each_candidate() -> None:
    inputs, board = torch.tensor([[2, 1, 1, 1]]), torch.tensor([[2, 3, 1, 1]])
    known = what_is_known(inputs, board, 2)
    assert known.tolist() == [
        [[GIVEN, EXCLUDED], [EXCLUDED, GUESSED], [OPEN, OPEN], [OPEN, OPEN]],
    ]
