"""Training by guessing: what a slot plays, what it learns from, and what counts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from contract import Batch, Context, Noise, StepOut
from data.recursive.puzzles import PuzzleSpec
from data.recursive.sudoku_boards import generate
from models.recursive.candidates import BLANK
from models.recursive.guessing import GuessObjective
from tests.making import make_objective
from tests.models.recursive.slots import rows_of, steps
from tests.ranks import words
from tests.runs import TINY_CANDIDATES, train
from utils.ranks import signals
from utils.rundir import terminal

LEARNS = words("""
    arch.hidden_size=24 arch.num_heads=null arch.forward_dtype=float32 arch.loss.search_steps=40
    data.embedded.train=200 max_steps=200 epochs=null eval_interval=null ema=false
""")
SPEC = PuzzleSpec(vocab_size=6, seq_len=16, table_rows=1)


def make(**keys: Any) -> GuessObjective:
    losses = {"think_steps": 1, "board_steps": 9, **keys}
    keys = {"hidden_size": 8, "num_heads": 2, "passes": 2, "loss": losses}
    objective = make_objective("candidates", SPEC, **keys)
    with torch.no_grad():  # a net that prefers some digits
        weight = objective.model.inner.option_head.weight
        weight.normal_(generator=torch.Generator().manual_seed(1))
    return objective


def batch_of(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    boards = generate(4, (rows,), 9, seed)[0]
    tokens = [torch.from_numpy(np.asarray(of).astype(np.int32)) for of in boards]
    inputs, labels = (of.view(rows, 16) + BLANK for of in tokens)
    identifiers = torch.zeros(rows, dtype=torch.int32)
    return {"inputs": inputs, "labels": labels, "puzzle_identifiers": identifiers}


def play(
    objective: GuessObjective, count: int, shards: Sequence[int] = (0, 1), rows: Any = slice(None)
) -> list[tuple[Batch, StepOut]]:
    """The batches and outputs of consecutive steps."""
    batches = [rows_of(batch_of(8, step), rows) for step in range(count)]
    return list(zip(batches, steps(objective, batches, shards), strict=True))


def test_a_slot_plays_its_puzzle_until_it_is_done() -> None:
    seen = play(make(), 30)
    ended = kept = 0
    for (_, before), (batch, after) in pairwise(seen):
        done = before.carry.done
        for name in ("labels", "puzzle_identifiers"):
            now = after.carry.batch[name]
            assert torch.equal(now[done], batch[name][done])
            assert torch.equal(now[~done], before.carry.batch[name][~done])
        going = before.carry.board[~done]
        assert (after.carry.board[~done][going != BLANK] == going[going != BLANK]).all(), (
            "what is filled in stays"
        )
        assert (after.carry.steps == torch.where(done, 1, before.carry.steps + 1)).all()
        ended, kept = ended + int(done.sum()), kept + int((~done).sum())
    assert ended
    assert kept


def test_one_guess_a_step_once_it_has_thought() -> None:
    seen = play(make(think_steps=2, sure=1.0, revealed=0.0), 12)
    for (_, before), (_, after) in pairwise(seen):
        done, thought = before.carry.done, after.carry.steps > 2
        going = thought & (before.carry.board == BLANK).any(-1)
        guesses = ((after.carry.board != before.carry.board) & ~done[:, None]).sum(-1)
        assert (guesses[~done] == going[~done].int()).all()


def test_corrected_guesses_are_never_wrong_and_uncorrected_ones_end_the_game() -> None:
    for _, out in play(make(corrected=1.0, sure=1.0), 20):
        assert int(out.carry.lost.sum()) == 0
    seen = [out.carry for _, out in play(make(corrected=0.0, wrong_steps=2, sure=1.0), 20)]
    assert any(carry.lost.any() for carry in seen)
    for carry in seen:
        labels, board = carry.batch["labels"], carry.board
        wrong = ((board != BLANK) & (board != labels)).any(-1)
        assert torch.equal(carry.lost > 0, wrong)
        assert carry.done[carry.lost > 2].all()
        assert int(carry.lost.max()) <= 3


def test_losses_by_hand() -> None:
    """A right slot learns its open cells, a wrong one only its value."""
    objective, batch = make(value_weight=0.3), batch_of(4)
    carry = objective.initial_carry(batch)
    board = batch["inputs"].clone()
    cell = int((board[1] == BLANK).nonzero()[0])
    board[1, cell] = (batch["labels"][1, cell] - BLANK) % 4 + BLANK + 1
    lost = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    carry = replace(carry, board=board, lost=lost, done=torch.zeros(4, dtype=torch.bool))
    out = objective(batch, carry, Context(0.0, Noise(0, 0, [0])))

    options = torch.zeros(4, 16, 4, dtype=torch.long)
    for row, at in np.ndindex(4, 16):
        token = int(board[row, at])
        if token != BLANK:
            given = bool(batch["inputs"][row, at] == token)
            options[row, at] = 3
            options[row, at, token - BLANK - 1] = 1 if given else 2
    _, logits, value = objective.model(carry.state, options)
    expected = torch.tensor(0.0)
    for row in range(4):
        p = torch.sigmoid(value[row])
        expected = expected - 0.3 * (p if row != 1 else 1 - p).log()
        if row != 1:
            open_cells = (board[row] == BLANK).nonzero()[:, 0].tolist()
            digits = (batch["labels"][row] - BLANK - 1).tolist()
            nats = [-logits[row, at].log_softmax(-1)[digits[at]] for at in open_cells]
            expected = expected + sum(nats) / len(nats)
    assert_close(out.loss, expected)
    assert int(out.weight) == 4


def test_slots_do_not_see_each_other() -> None:
    """A step over two shards is the two steps over one shard each."""
    whole = play(make(), 6)
    for shard in (0, 1):
        rows = slice(4 * shard, 4 * shard + 4)
        parts = play(make(), 6, [shard], rows)
        for (_, out), (_, part) in zip(whole, parts, strict=True):
            assert torch.equal(out.carry.board[rows], part.carry.board)
            assert_close(out.carry.state[rows], part.carry.state)


@pytest.mark.slow
def test_it_learns_to_solve_small_boards(tmp_path: Path) -> None:
    run = train(tmp_path / "run", *TINY_CANDIDATES, *LEARNS)
    last = [row for row in run.rows if "eval/exact_accuracy" in row][-1]
    assert last["eval/exact_accuracy"] > 0.9
    assert last["eval/accepted"] > 0.9, "the net knows that it is right"
    assert last["eval/exact_accuracy_n"] == 37, "padding rows count nowhere"


def test_a_signal_cuts_a_search_short(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, seen = make(think_steps=1000, search_steps=1000).eval(), []
    objective.model.register_forward_pre_hook(lambda *_: seen.append(1))
    monkeypatch.setattr(signals, "flags", [1.0, 0.0, 0.0])
    objective.predict(batch_of(4))
    assert len(seen) == 1


def test_a_long_search_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PAUSE_S", 0.0)
    objective, lines = make(think_steps=1000, search_steps=4).eval(), list[str]()
    objective.progress = terminal.Progress(lines.append)
    objective.predict(batch_of(4))
    told = [line.split("  ")[1] for line in lines]
    assert told == [f"searching a batch of 4: step {step}/4" for step in (1, 2, 3)]
