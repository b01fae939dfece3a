"""The net for Sudoku: its answers move with the board under every symmetry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from contract import Spec
from data.recursive.sudoku_boards import cell_permutations, digit_permutations
from models.recursive.sudoku_net import (
    EXCLUDED,
    GIVEN,
    GUESSED,
    OPEN,
    what_is_known,
)
from tests.making import make_objective


def spec_of(side: int) -> Spec:
    return Spec(vocab_size=side + 2, seq_len=side * side, table_rows=1)


def trained_net(side: int) -> Any:
    """A net with random weights everywhere, as after training, in float64."""
    keys: dict[str, Any] = {"hidden_size": 8, "passes": 3, "forward_dtype": "float64"}
    net = make_objective("sudoku", spec_of(side), **keys).model
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return net.eval()


@pytest.mark.parametrize("side", [4, 6, 9])
def test_answers_move_with_the_board_under_every_symmetry(side: int) -> None:
    net, rng = trained_net(side), np.random.default_rng(side)
    boards = 6
    known = torch.from_numpy(rng.integers(0, 4, (1, side * side, side))).expand(boards, -1, -1)
    cells = torch.from_numpy(cell_permutations(side, boards, rng)).long()
    digits = torch.from_numpy(digit_permutations(side, boards, rng)[:, 1:].astype(np.int64)) - 1

    def image(of_BTN: torch.Tensor) -> torch.Tensor:
        moves = zip(of_BTN, cells, digits, strict=True)
        return torch.stack([one[cell][:, digit] for one, cell, digit in moves])

    assert not torch.equal(image(known), known)
    with torch.no_grad():
        _, logits, value = net(net.fresh_state(boards), known)
        _, of_images, value_of_images = net(net.fresh_state(boards), image(known))
    assert logits.std() > 0.1, "the net says the same of all options: the test shows nothing"
    assert_close(of_images, image(logits))
    assert_close(value_of_images, value)


def test_a_board_that_is_no_image_has_other_answers() -> None:
    """Two cells swapped across boxes: the units differ, and so must what the net makes of them."""
    net, rng = trained_net(9), np.random.default_rng(1)
    known = torch.from_numpy(rng.integers(0, 4, (1, 81, 9)))
    order = torch.arange(81)
    order[[0, 80]] = order[[80, 0]]
    with torch.no_grad():
        value, other = (net(net.fresh_state(1), of)[2] for of in (known, known[:, order]))
    assert (value - other).abs() > 1e-6


def test_what_is_known_of_each_option() -> None:
    inputs, board = torch.tensor([[2, 1, 1, 1]]), torch.tensor([[2, 3, 1, 1]])
    known = what_is_known(inputs, board, 2)
    assert known.tolist() == [
        [[GIVEN, EXCLUDED], [EXCLUDED, GUESSED], [OPEN, OPEN], [OPEN, OPEN]],
    ]
