import numpy as np
import pytest

from contract import IGNORE
from data.order import Order, RaggedSteps, UniformSteps, cut_steps
from data.recursive.puzzles import pack
from tests.data.helpers import global_batch, joined
from tests.data.recursive.helpers import ragged_groups, row_numbers, source, write_dataset


def reference_spans(
    order: Order, sizes: np.ndarray, batch: int, epochs: int, interval: int
) -> tuple[list, list]:
    """HRM's rule, one visit at a time: (spans of all steps, steps done at the end of each
    iteration).
    """
    spans, ends = [], []
    for iteration in range(epochs // interval):
        position = iteration * interval * order.items
        end = position + interval * order.items
        start, filled = position, 0
        while position < end:
            filled += sizes[order.visits(position, position + 1)[0]]
            position += 1
            if filled >= batch:
                spans.append((start, position))
                start, filled = position, 0
        ends.append(len(spans))
    return spans, ends


@pytest.mark.parametrize(
    ("sizes", "batch", "epochs", "interval"),
    [
        (np.random.default_rng(1).integers(0, 7, 60), 16, 12, 3),
        (np.random.default_rng(2).integers(1, 40, 60), 9, 6, 1),
        (np.full(60, 1), 7, 12, 4),
        (np.full(60, 5), 16, 12, 6),
        (np.full(60, 9), 4, 4, 4),
    ],
)
def test_steps_equal_the_slow_reference(sizes, batch, epochs, interval):
    order = Order(3, 20, (np.arange(0, 60, 3), np.full(20, 3)))
    steps = cut_steps(order, sizes, batch, epochs, interval)
    spans, ends = reference_spans(order, sizes, batch, epochs, interval)
    assert isinstance(steps, RaggedSteps if len(set(sizes)) > 1 else UniformSteps)
    # asked last first: nothing depends on what was asked before
    assert [steps.span(step) for step in reversed(range(len(spans)))][::-1] == spans
    assert [done for done in range(len(spans) + 1) if steps.ends_iteration(done)] == ends
    assert steps.total == len(spans)
    assert steps.span(len(spans) + 5)[0] >= epochs * order.items  # goes on beyond the last epoch


def test_pack_takes_whole_puzzles_and_part_of_the_last():
    first, size = np.array([100, 200, 300]), np.array([4, 3, 50])
    rows, owner = pack(first, size, 12, np.random.default_rng(0))
    assert owner.tolist() == [0] * 4 + [1] * 3 + [2] * 5
    assert sorted(rows[:7]) == [100, 101, 102, 103, 200, 201, 202]
    assert len(set(rows[7:])) == 5
    assert ((rows[7:] >= 300) & (rows[7:] < 350)).all()
    orders = {
        tuple(pack(first, size, 12, np.random.default_rng(seed))[0][:4]) for seed in range(200)
    }
    assert len(orders) == 24  # every order of four examples occurs


@pytest.mark.parametrize("groups", [ragged_groups(30), [[1, 1, 1]] * 30])
def test_batches_hold_what_was_visited_whole_and_once(tmp_path, groups):
    arrays = write_dataset(tmp_path, groups)
    made = source(tmp_path)
    puzzle_of = np.repeat(
        np.arange(len(arrays["puzzle_identifiers"])), np.diff(arrays["puzzle_indices"])
    )
    group_of = np.repeat(np.arange(len(groups)), np.diff(arrays["group_indices"]))
    visited = []
    for step in range(made.length.total_steps):
        batch = global_batch(made, step, 2)
        rows = row_numbers(batch["inputs"])
        puzzles = puzzle_of[rows]
        assert (batch["puzzle_identifiers"] == puzzles + 1).all()
        assert (batch["labels"][:, 0] == IGNORE).all()
        assert (batch["labels"][:, 1:] == batch["inputs"][:, 1:]).all()
        runs = [puzzles[0], *puzzles[1:][puzzles[1:] != puzzles[:-1]]]
        assert len(set(rows)) == len(rows) or len(set(runs)) < len(runs)
        for puzzle in runs[:-1]:
            assert np.isin(np.flatnonzero(puzzle_of == puzzle), rows).all()
        visited += [group_of[puzzle] for puzzle in runs]
        if made.length.evaluates_after(step + 1):
            # the last epoch lacks what was dropped
            for first in range(0, len(visited), len(groups)):
                epoch = visited[first : first + len(groups)]
                assert len(set(epoch)) == len(epoch)
            assert len(visited) > 2 * len(groups)
            visited = []


def test_several_paths_keep_ids_and_set_names_apart(tmp_path):
    for name, groups in (("a", [[1]] * 20), ("b", [[2]] * 15)):
        write_dataset(tmp_path / name, groups)
        write_dataset(tmp_path / name, groups[:7], "test", num_puzzle_identifiers=len(groups) + 1)
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    made = source(data_paths=paths)
    assert made.spec.table_rows == 21 + 16
    steps = range(made.length.total_steps)
    seen = joined(global_batch(made, step, 2) for step in steps)["puzzle_identifiers"]
    assert set(seen) <= {*range(1, 21), *range(22, 37)}
    assert len(set(seen)) > 30
    sets = made.eval_sets()
    assert set(sets) == {"a/all", "b/all"}
    assert sets["a/all"].read(np.array([3]))["puzzle_identifiers"] == 4
    batch = sets["b/all"].read(np.array([5, 0]))  # examples 4 and 5 are the third puzzle's
    assert batch["puzzle_identifiers"].tolist() == [21 + 3, 21 + 1]
    assert row_numbers(batch["inputs"]).tolist() == [5, 0]
    padding = sets["b/all"].padding(2)
    assert (padding["labels"] == IGNORE).all()
    assert padding["puzzle_identifiers"].tolist() == [21, 21]
    assert set(source(data_paths=paths[:1]).eval_sets()) == {"all"}
    swapped = source(data_paths=paths, data_paths_test=paths[::-1]).eval_sets()
    assert swapped["b/all"].read(np.array([0]))["puzzle_identifiers"] == 22
    assert made.spec.fingerprint != source(data_paths=paths[::-1]).spec.fingerprint
