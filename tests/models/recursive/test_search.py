"""The search over guesses, with a net that is made up and so makes known mistakes."""

import gc
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from models.recursive import search
from models.recursive.candidates import BLANK
from models.recursive.search import WITH_STATE, Rules, answers_by_search, second_look

RULES: dict[str, Any] = {"think_steps": 1, "fill_above": 0.99, "try_above": 0.01, "beam": 4}
RULES |= {"waiting": 0, "search_steps": 30, "accept": 0.95}
SOLUTION = torch.tensor([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]) + BLANK


@pytest.fixture(autouse=True)
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up nets are never sure of a digit."""
    monkeypatch.setattr(search, "second_look", lambda *given: given[-2])


class MadeUpNet:
    """Knows the solution, but finds another digit a little likelier in every cell. Notices a wrong
    guess after `delay` further steps, or once the board is full.
    """

    side, compiled, dtype = 4, False, torch.float32

    def __init__(self, delay: int = 0, value: float = 5.0, right: float = 0.4) -> None:
        self.delay, self.value, self.right, self.calls = delay, value, right, 0

    def fresh_state(self, boards: int) -> torch.Tensor:
        return torch.zeros(boards, 1)

    def weights_in_dtype(self) -> dict[str, torch.Tensor]:
        return {}

    def __call__(self, state: torch.Tensor, known: torch.Tensor, weights: object):
        self.calls += len(state)
        right = torch.nn.functional.one_hot(SOLUTION - BLANK - 1, 4).bool()
        guessed = known == 2
        wrong = (guessed & ~right).any(-1).any(-1)
        state = torch.where(wrong[:, None], state + 1, 0)
        p = self.right * right + (0.99 - self.right) * right.roll(1, -1) + 1e-3
        full = (known != 0).all(-1).all(-1)
        noticed = wrong & (full | (state[:, 0] > self.delay))
        logits = (p / p.sum(-1, keepdim=True)).log().expand(len(state), -1, -1)
        return state, logits, torch.where(noticed, -self.value, self.value)


class StubbornNet(MadeUpNet):
    """Notices a wrong guess in a full board, and only where it begins there."""

    def __call__(self, state: torch.Tensor, known: torch.Tensor, weights: object):
        begins, nothing = state[:, 0] == 0, torch.zeros_like(state)
        _, logits, value = super().__call__(nothing, known, weights)
        return state + 1, logits, torch.where(begins, value, self.value)


def solve(net: MadeUpNet, blanks: list[int], **changes: Any) -> tuple[bool, list]:
    puzzle = SOLUTION.clone()
    puzzle[blanks] = BLANK
    rules = Rules(**{**RULES, **changes})
    steps = list(answers_by_search(net, {"inputs": puzzle[None]}, rules))
    return torch.equal(steps[-1][0].argmax(-1)[0], SOLUTION), steps


def test_a_beam_of_two_finds_what_the_likeliest_digits_miss() -> None:
    blanks = [0, 5, 10, 15]
    assert solve(MadeUpNet(), blanks)[0]
    assert solve(MadeUpNet(), blanks, beam=2)[0]
    assert not solve(MadeUpNet(), blanks, beam=1)[0]


def test_mistakes_that_are_noticed_late_need_a_wider_beam() -> None:
    blanks = [0, 5, 10, 15, 3]
    assert not solve(MadeUpNet(delay=2), blanks, beam=2)[0]
    assert solve(MadeUpNet(delay=2), blanks, beam=16)[0]


def test_boards_that_wait_are_seen_when_the_better_ones_have_failed() -> None:
    blanks = [0, 5, 10, 15, 3]
    one = {"beam": 1, "search_steps": 100}
    assert not solve(MadeUpNet(delay=2), blanks, **one)[0]
    assert solve(MadeUpNet(delay=2), blanks, **one, waiting=20)[0]


class StatesNet(MadeUpNet):
    """Notes the most states that were in memory at once; one is told by its width."""

    most, width = 0, 77

    def fresh_state(self, boards: int) -> torch.Tensor:
        return torch.zeros(1, self.width).expand(boards, -1)

    def __call__(self, *given: Any):
        tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
        rows = sum(len(each) for each in tensors if each.shape[1:] == (self.width,))
        self.most = max(self.most, rows)
        return super().__call__(*given)


def test_few_of_the_boards_that_wait_keep_a_state() -> None:
    net = StatesNet(value=1.0)  # never sure enough, so that many boards wait
    rules = Rules(**RULES | {"waiting": 1000, "search_steps": 60})
    gc.freeze()  # what is there before the search need not be looked through
    for _ in answers_by_search(net, {"inputs": torch.full((1, 16), BLANK)}, rules):
        pass
    gc.unfreeze()
    assert net.calls > 200
    assert net.most > rules.beam, "states are seen"
    # the best, those of the step before, and those that the net is given
    assert net.most <= 1 + (rules.beam + WITH_STATE) + 3 * rules.beam


def test_a_digit_that_was_filled_in_wrongly_is_found_by_others_in_its_place() -> None:
    rules = {"fill_above": 0.98, "waiting": 20}
    assert solve(MadeUpNet(right=0.004), [0, 5], try_above=0.002, **rules)[0]
    assert not solve(MadeUpNet(right=0.004), [0, 5], **rules)[0]


def test_a_full_board_is_looked_at_afresh() -> None:
    solved, steps = solve(StubbornNet(delay=99), [0, 5])
    assert solved
    assert float(steps[-1][1]) > 0


def test_the_search_ends_with_an_accepted_board_or_goes_on() -> None:
    _, steps = solve(MadeUpNet(), [0, 5])
    margins = [float(margin) for _, margin in steps]
    assert margins[-1] > 0 >= max(margins[:-1])
    # of a net that is never sure enough, every node is seen
    unsure = MadeUpNet(value=1.0)
    solved, steps = solve(unsure, [0, 5])
    assert solved
    assert float(steps[-1][1]) <= 0


class CredulousNet(MadeUpNet):
    """Takes every full board for right, but is sure of the last four cells."""

    def __call__(self, state: torch.Tensor, known: torch.Tensor, weights: object):
        state, logits, value = super().__call__(state, known, weights)
        last = ((known == 0).all(-1).sum(-1) <= 4)[:, None, None]
        right = torch.nn.functional.one_hot(SOLUTION - BLANK - 1, 4) * 9.0
        return state, torch.where(last, right, logits), torch.full_like(value, self.value)


def test_a_full_board_is_worth_as_much_as_its_most_doubtful_digit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blanks, far = [0, 2, 5, 7, 8], {"beam": 1, "waiting": 100}
    solved, steps = solve(CredulousNet(), blanks, **far)
    assert not solved, "the value alone accepts a wrong board"
    assert float(steps[-1][1]) > 0
    monkeypatch.setattr(search, "second_look", second_look)
    solved, steps = solve(CredulousNet(), blanks, **far)
    assert solved
    assert float(steps[-1][1]) > 0
    # a net that is sure of nothing accepts nothing: its likeliest digits have a probability of 0.4
    _, steps = solve(MadeUpNet(), [0, 5])
    value = steps[-1][1] + Rules(**RULES).threshold
    assert_close(value.sigmoid(), torch.tensor([0.4]), atol=0.01, rtol=0)


def test_more_puzzles_than_fit_at_once_are_each_searched_as_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    blank = torch.rand(90, 16, generator=generator) < 0.3
    puzzles = torch.where(blank, BLANK, SOLUTION)
    *_, (together, margin) = answers_by_search(MadeUpNet(1), {"inputs": puzzles}, Rules(**RULES))
    for row in (0, 1, 63, 64, 89):
        *_, (alone, own_margin) = answers_by_search(
            MadeUpNet(1), {"inputs": puzzles[row : row + 1]}, Rules(**RULES)
        )
        assert_close(together[row], alone[0])
        assert_close(margin[row], own_margin[0])


def test_a_padded_row_takes_one_step() -> None:
    net = MadeUpNet()
    steps = list(
        answers_by_search(net, {"inputs": torch.zeros(3, 16, dtype=torch.long)}, Rules(**RULES))
    )
    assert (len(steps), net.calls) == (1, 3)
