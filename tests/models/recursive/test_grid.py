"""The net for grids: its values are distances once rewards and costs are right, and its steps go on
from each other.
"""

from typing import Any

import numpy as np
import torch
from torch.testing import assert_close

from contract import Noise
from data.recursive.maze import FREE, GOAL, PATH, START, WALL, generate, search
from data.recursive.puzzles import PuzzleSpec
from models.recursive.grid import UNREACHED
from tests.making import make_objective

MAZES = [maze for chunk in range(4) for maze in generate(8, 16, 3, chunk)][:6]
NO_NOISE = Noise(0, 0, range(1), torch.device("cpu"))
INPUTS = np.stack([inputs for inputs, _ in MAZES])


def net(**keys: Any) -> Any:
    spec = PuzzleSpec(vocab_size=PATH + 1, seq_len=64, table_rows=1)
    return make_objective("grid", spec, hidden_size=8, **keys).model.eval()


def step(model: Any, state: Any = None) -> tuple[Any, torch.Tensor]:
    tokens = torch.from_numpy(INPUTS).long()
    state = state or model.fresh_state(NO_NOISE, *tokens.shape)
    with torch.no_grad():
        return model(state, tokens, None)[:2]


def test_values_are_distances_from_the_goal_if_walls_cost_too_much() -> None:
    model = net(L_cycles=64)
    with torch.no_grad():
        model.inner.rewards.embedding_weight.fill_(UNREACHED)
        model.inner.rewards.embedding_weight[GOAL] = 0
        model.inner.costs.embedding_weight.zero_()  # their logarithms
        model.inner.costs.embedding_weight[WALL] = 1
    (_, values), _ = step(model)
    for maze, value in zip(INPUTS, values, strict=True):
        far = np.array(search(maze, int((maze == GOAL).argmax())).distance)
        reached = far >= 0
        assert set(maze[reached].tolist()) == {FREE, START, GOAL}
        for channel in value[1:].T.numpy():
            assert (channel[reached] == -far[reached]).all()
            assert (channel[~reached] < -far.max()).all()


def test_two_steps_are_one_of_twice_the_length_once_the_values_stand() -> None:
    short, long = net(L_cycles=500, H_cycles=5), net(L_cycles=500, H_cycles=10)
    long.load_state_dict(short.state_dict())
    state, first = step(short)
    _, second = step(short, state)
    _, whole = step(long)
    assert_close(second, whole)
    assert (first - second).abs().max() > 0.1


def test_half_precision_counts_steps_all_the_same() -> None:
    wide, narrow = net(L_cycles=300), net(L_cycles=300, forward_dtype="bfloat16")
    for model in (wide, narrow):
        with torch.no_grad():  # numbers that bfloat16 holds, and sums that it does not
            model.inner.rewards.embedding_weight.fill_(-16)
            model.inner.rewards.embedding_weight[GOAL] = 16
            model.inner.costs.embedding_weight.zero_()
    values = [step(model)[0][1] for model in (wide, narrow)]
    assert torch.equal(values[0][:, 1:], values[1][:, 1:])
    assert not torch.equal(values[0], values[0].bfloat16().float())


def test_without_values_word_travels_one_cell_in_each_pass() -> None:
    heard = {}
    for value_iteration in (False, True):
        model = net(value_iteration=value_iteration, H_cycles=3)
        tokens = torch.full((1, 64), FREE)
        other = tokens.clone()
        other[0, 0] = GOAL
        state = model.fresh_state(NO_NOISE, 1, 64)
        with torch.no_grad():
            changed = [model(state, board, None)[1][0] for board in (tokens, other)]
        differs = (changed[0] != changed[1]).any(-1).view(8, 8)
        heard[value_iteration] = [bool(differs[at, at]) for at in range(8)]
    assert heard[False] == [True] * 3 + [False] * 5  # the first pass hears what all have alike
    assert all(heard[True])
