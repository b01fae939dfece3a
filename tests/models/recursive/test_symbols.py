"""The net with a field for each symbol: it gives symbols no names, and knows where cells are."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from contract import Noise, Spec
from data.recursive.puzzles import PuzzleSpec
from tests.making import make_objective

SUDOKU, SYMBOLS = PuzzleSpec(name="boards", vocab_size=11, seq_len=81, table_rows=1), 9
BLANK, FIRST = 1, 2
NOISE = Noise(0, 0, range(1), torch.device("cpu"))


def net(spec: Spec = SUDOKU, **keys: Any) -> Any:
    model = make_objective("symbols", spec, forward_dtype="float64", **keys).model.double().eval()
    with torch.no_grad():
        model.inner.q_head.weight.normal_()  # zero at first
    return model


def steps(model: Any, tokens_BT: Tensor, number: int = 3) -> tuple[Tensor, Tensor]:
    """Returns the logits after some steps."""
    state = model.fresh_state(NOISE, *tokens_BT.shape)
    with torch.no_grad():
        for _ in range(number):
            state, logits_BTV, q_B2 = model(state, tokens_BT, None)
    return logits_BTV, q_B2


def boards(first: int, vocabulary: int, cells: int) -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(first, vocabulary, (4, cells), generator=drawn)
    return torch.where(torch.rand(4, cells, generator=drawn) < 0.6, BLANK, tokens)


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        (SUDOKU, {}),
        (SUDOKU, {"mlp_norm": False, "H_cycles": 2}),
        (PuzzleSpec(vocab_size=7, seq_len=16, table_rows=1), {"symbols": 3}),
    ],
)
def test_other_symbols_get_the_same_answer_in_those_symbols(
    spec: Spec, keys: dict[str, Any]
) -> None:
    model, symbols = net(spec, **keys), keys.get("symbols", SYMBOLS)
    first = spec.vocab_size - symbols
    named = torch.arange(spec.vocab_size)
    named[first:] = first + torch.randperm(symbols, generator=torch.Generator().manual_seed(1))
    tokens = boards(first, spec.vocab_size, spec.seq_len)
    logits, q = steps(model, tokens)
    of_others, q_of_others = steps(model, named[tokens])
    assert_close(of_others[..., named], logits)
    assert_close(q_of_others, q)
    assert (logits.amax(-1) - logits.amin(-1)).min() > 1e-3


def test_blanks_and_symbols_are_told_apart() -> None:
    model, tokens = net(), boards(FIRST, 11, 81)
    emptied = tokens.clone()
    emptied[0, int((tokens[0] != BLANK).nonzero()[0])] = BLANK
    before, after = steps(model, tokens)[0], steps(model, emptied)[0]
    assert_close(before[1:], after[1:])
    assert not torch.allclose(before[0], after[0])


def test_cells_hear_those_that_the_heads_weigh() -> None:
    """With heads that sum along rows alone, a cell hears its row, and nothing else."""
    model = net(L_layers=1, L_cycles=1)
    block = model.inner.level.layers[0]
    with torch.no_grad():
        block.mixer.rows.copy_(torch.eye(9).expand_as(block.mixer.rows))
        block.mixer.columns.fill_(1.0)
    tokens = torch.full((1, 81), BLANK)
    given = tokens.clone()
    given[0, 40] = FIRST  # row 4, column 4
    changed_T = (steps(model, tokens, 2)[0] - steps(model, given, 2)[0]).abs().amax(-1)[0] > 1e-9
    assert changed_T.nonzero()[:, 0].tolist() == list(range(36, 45))


def test_noise_and_damping_act_at_each_pass() -> None:
    tokens = boards(FIRST, 11, 81)
    quiet, noisy = net(), net(eval_noise=0.5)
    noisy.load_state_dict(quiet.state_dict())
    assert quiet.path_noise(NOISE, quiet.fresh_state(NOISE, 1, 81), 0.0) == []
    state = noisy.fresh_state(NOISE, *tokens.shape)
    drawn = noisy.path_noise(Noise(0, 0, range(4), torch.device("cpu")), state, 0.5)
    assert len(drawn) == 3, "one for each of L_cycles"
    with torch.no_grad():
        heard = [quiet(state, tokens, None, noise)[1] for noise in ((), drawn)]
    assert (heard[0] - heard[1]).abs().max() > 1e-3
    assert not torch.equal(steps(net(damping=0.5), tokens)[0], steps(quiet, tokens)[0])
