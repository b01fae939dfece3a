"""N-gram probabilities: beside the same formulas by dictionaries, and as a distribution."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from tests.bench.ngram import log_probabilities

SYMBOLS = 4
ROWS = np.random.default_rng(0).choice(SYMBOLS, (12, 40), p=[0.55, 0.3, 0.1, 0.05])
Gram = tuple[int, ...]


def by_dictionaries(given: Gram, symbol: int, order: int, most: int) -> float:
    """The probability of a symbol by grams of this length and less; `most` is the longest."""
    if order == 0:
        return 1 / SYMBOLS

    def grams(length: int) -> list[Gram]:
        return [tuple(row[at : at + length]) for row in ROWS.tolist() for at in range(41 - length)]

    longer = {gram[1:]: 0 for gram in grams(order + 1)}
    for gram in {*grams(order + 1)}:
        longer[gram[1:]] += 1
    # those with which a row begins have nothing before them, and are known with a count of 0
    counts = Counter(grams(order)) if order == most else dict.fromkeys(grams(order), 0) | longer
    n = [0, *(max(1, [*counts.values()].count(times)) for times in (1, 2, 3, 4))]
    y = n[1] / (n[1] + 2 * n[2])
    taken = [0, *(times - (times + 1) * y * n[times + 1] / n[times] for times in (1, 2, 3))]
    taken = [min(max(each, 0), times) for times, each in enumerate(taken)]

    context = given[len(given) - order + 1 :]
    followed = {gram: count for gram, count in counts.items() if gram[:-1] == context}
    shorter = by_dictionaries(given, symbol, order - 1, most)
    if not (total := sum(followed.values())):
        return shorter
    count = followed.get((*context, symbol), 0)
    left_over = sum(taken[min(each, 3)] for each in followed.values())
    return (count - taken[min(count, 3)] + left_over * shorter) / total


@pytest.mark.parametrize("order", [1, 2, 4])
def test_it_is_kneser_ney_by_dictionaries(order: int) -> None:
    asked = np.random.default_rng(1).integers(SYMBOLS, size=(3, 6))
    got = log_probabilities(ROWS, asked, order, SYMBOLS)
    for row, column in itertools.product(range(3), range(1, 6)):
        given = tuple(asked[row, :column].tolist())
        longest = min(order, column + 1)
        said = by_dictionaries(given, int(asked[row, column]), longest, order)
        assert got[row, column - 1] == pytest.approx(math.log(said), abs=1e-12)


@pytest.mark.parametrize("order", [1, 3, 6])
def test_chances_of_all_symbols_sum_to_one(order: int) -> None:
    asked = np.array([[0, 1, 0, 0, 2, last] for last in range(SYMBOLS)])
    chances = np.exp(log_probabilities(ROWS, asked, order, SYMBOLS))[:, -1]
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert (chances > 0).all()
