"""The search of `arch=candidates` by a trained net, and by baselines in its place.

python -m tests.bench.bench_search RUN DATA [BOARDS]

RUN is its run, DATA a folder of boards whose test set is searched. The first baseline fills in
naked and hidden singles and detects contradictions; the last is the net before training, on few
boards. A state is one board in one step of the search. Below: how much of the net's weights between
cells follows from the board's lines.
"""

import math
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.recursive.sudoku import geometry, propagate, search, to_masks
from data.recursive.sudoku_boards import BOXES
from models.language import targets
from models.recursive.candidates import BLANK, GIVEN, GUESSED, CandidateNet
from models.recursive.search import NEVER, Rules, answers_by_search
from tests.making import make_objective, make_source
from utils.errors import exit_status
from utils.measure.metrics import wilson

TOGETHER = 50  # boards
BOARDS, FEW = 300, 50


class Singles:
    """Looks like a net, and answers by the rules."""

    dtype, compiled = torch.float32, False

    def __init__(self, side: int) -> None:
        self.side = side

    def fresh_state(self, boards: int) -> Tensor:
        return torch.zeros(boards, 1)

    def weights_in_dtype(self) -> dict[str, Tensor]:
        return {}

    def __call__(
        self, state: Tensor, known_BTN: Tensor, weights: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        filled_BTN = (known_BTN == GIVEN) | (known_BTN == GUESSED)
        digits_BT = (filled_BTN * (torch.arange(self.side) + 1)).sum(-1).numpy()
        masks_TB = to_masks(digits_BT, self.side)
        possible_B = torch.from_numpy(propagate(masks_TB, geometry(self.side)))
        open_TBN = masks_TB[..., None] >> np.arange(self.side, dtype=np.uint16) & 1
        open_BTN = torch.from_numpy(open_TBN.astype(np.int64)).transpose(0, 1)
        return state, torch.where(open_BTN > 0, 0.0, NEVER), torch.where(possible_B, 9.0, NEVER)


def main() -> None:
    if len(sys.argv) < 3:
        print("skipped: give RUN, a run of arch=candidates, and DATA")
        return
    run, data, *boards = sys.argv[1:]
    count = int(boards[0]) if boards else BOARDS
    source = make_source("puzzles", data_path=data, global_batch_size=8, max_steps=1, epochs=None)
    (examples,) = source.eval_sets().values()
    count = min(count, len(examples))
    rows = examples.read(np.arange(count))
    trained = targets.load_frozen(
        run, source.spec, "float32", (CandidateNet,), "give arch=candidates"
    ).net
    untrained = make_objective("candidates", source.spec)
    rules = untrained.keys
    side = math.isqrt(source.spec.seq_len)
    singles = Singles(side)
    print(f"{count} boards of {data}, one thread: {run}")
    print("| what guides the search | boards | solved | 95 % | accepted wrongly | states | CPU s |")
    print("|---|---|---|---|---|---|---|")
    line = rules.model_copy(update={"beam": 1, "search_steps": 64})
    for name, net in (("naked and hidden singles, no net", singles), ("the net", trained)):
        print_row(name, *measure(net, rows, rules))
        print_row(f"{name}, in one line of 64 steps", *measure(net, rows, line))
    few = {name: values[:FEW] for name, values in rows.items()}
    print_row("the net, untrained", *measure(untrained.model, few, rules))
    before = time.process_time()
    found = search(to_masks(rows["inputs"].astype(np.int64) - BLANK, side), side, 2)
    seconds, solved = time.process_time() - before, int((found.counts == 1).sum())
    print_row(
        "depth first, to a second solution", count, solved, 0, int(found.guesses.sum()), seconds
    )
    for block in trained.inner.layers:
        shares = [f"{100 * share:.1f}" for share in by_lines(block.mixer.weights(), BOXES[side])]
        print(f"of each head's weights, by lines: {', '.join(shares)} %")


def by_lines(weight_HTT: Tensor, box: tuple[int, int]) -> list[float]:
    """Returns how much of each head's weights, by their squares, is the mean over all pairs of
    cells of the same kind. There are nine, which Sudoku's symmetries tell apart: two cells have the
    same row, or the same band, or neither, and the same column, stack, or neither.
    """
    line = torch.arange(box[0] * box[1])
    rows, columns = (
        (line[:, None] == line).int() + (line[:, None] // size == line // size) for size in box
    )
    kind_X = (3 * rows[:, None, :, None] + columns[:, None]).flatten()
    shares = []
    for weight_X in weight_HTT.detach().double().flatten(1):
        sums = torch.zeros(9, dtype=torch.float64).index_add(0, kind_X, weight_X)
        mean_X = (sums / kind_X.bincount(minlength=9))[kind_X]
        shares.append(float(mean_X.square().sum() / weight_X.square().sum()))
    return shares


class Counted:
    """A net, or what looks like one, that counts the boards it sees."""

    compiled = False

    def __init__(self, net: Any) -> None:
        self.net, self.side, self.dtype, self.states = net, net.side, net.dtype, 0
        self.fresh_state, self.weights_in_dtype = net.fresh_state, net.weights_in_dtype

    def __call__(self, state: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.states += len(state)
        return self.net(state, *more)


@torch.no_grad()
def measure(
    net: Any, rows: dict[str, np.ndarray], rules: Rules
) -> tuple[int, int, int, int, float]:
    """Returns how many boards there are, are solved and are accepted wrongly, the states, and the
    CPU seconds.
    """
    inputs, labels = (torch.from_numpy(rows[name]) for name in ("inputs", "labels"))
    counted: Any = Counted(net)
    solved, wrong, before = 0, 0, time.process_time()
    for first, end in pairwise([*range(0, len(inputs), TOGETHER), len(inputs)]):
        *_, (logits, margin) = answers_by_search(counted, {"inputs": inputs[first:end]}, rules)
        right = (logits.argmax(-1) == labels[first:end]).all(-1)
        solved, wrong = solved + int(right.sum()), wrong + int((~right & (margin > 0)).sum())
    return len(inputs), solved, wrong, counted.states, time.process_time() - before


def print_row(name: str, count: int, solved: int, wrong: int, states: int, seconds: float) -> None:
    low, high = (100 * each for each in wilson(solved, count))
    print(
        f"| {name} | {count} | {100 * solved / count:.1f} % | {low:.1f}–{high:.1f} | {wrong} |"
        f" {states / count:,.0f} | {seconds / count:.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(exit_status(main))
