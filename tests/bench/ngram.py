"""An n-gram model with interpolated, modified Kneser-Ney smoothing (Chen and Goodman 1999): what a
language model must beat, after seconds of one core.

It counts once and does not adapt. Contexts end at the beginning of a row, as a net's do.
"""

import numpy as np

# N rows of L symbols, P positions of all rows in a line: first those trained on, then those asked


def log_probabilities(
    train_NL: np.ndarray, asked_NL: np.ndarray, order: int, vocabulary: int
) -> np.ndarray:
    """Returns the natural logarithm of the probability of each symbol of `asked_NL` but the first
    of a row, given those before it in its row, at most order - 1.
    """
    tables, trained = (train_NL, asked_NL), train_NL.size
    symbols_P = np.concatenate([table.ravel() for table in tables]).astype(np.int64)
    column_P = np.concatenate([np.tile(np.arange(each.shape[1]), len(each)) for each in tables])
    # grams of one length have numbers; context, a gram that is one shorter, ends a symbol earlier
    context_P = np.zeros_like(symbols_P)
    gram_P, first = _numbers(context_P, symbols_P, vocabulary, column_P >= 0)
    chance = np.full(asked_NL.size, 1 / vocabulary)
    for length in range(1, order + 1):
        whole_P = column_P >= length - 1
        own = first[(first < trained) & whole_P[first]]  # where each gram was first trained on
        if length < order:
            longer_context_P = np.concatenate([[0], gram_P[:-1]])
            whole_longer_P = column_P >= length
            longer_P, longer_first = _numbers(
                longer_context_P, symbols_P, vocabulary, whole_longer_P
            )
            # a short gram counts once for each symbol that was seen before it
            counted = longer_first[(longer_first < trained) & whole_longer_P[longer_first]]
        else:
            counted = np.flatnonzero(whole_P[:trained])
        count = np.bincount(gram_P[counted], minlength=len(first))
        discount = _discounts(count)
        taken = discount[np.minimum(count, 3)]

        contexts = int(context_P.max()) + 1
        total = np.bincount(context_P[own], count[gram_P[own]], contexts)
        left_over = np.bincount(context_P[own], taken[gram_P[own]], contexts)
        gram, context = gram_P[trained:], context_P[trained:]
        known = whole_P[trained:] & (total[context] > 0)
        gram, context = gram[known], context[known]
        chance[known] = (count[gram] - taken[gram] + left_over[context] * chance[known]) / total[
            context
        ]
        if length < order:
            context_P, gram_P, first = longer_context_P, longer_P, longer_first
    return np.log(chance).reshape(asked_NL.shape)[:, 1:]


def _numbers(
    context_P: np.ndarray, symbols_P: np.ndarray, vocabulary: int, whole_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of the gram that ends at each position, and where each gram is first;
    those that would begin before their row share one number.
    """
    keys = np.where(whole_P, context_P * vocabulary + symbols_P, -1)
    _, first, numbers = np.unique(keys, return_index=True, return_inverse=True)
    return numbers, first


def _discounts(count: np.ndarray) -> np.ndarray:
    """Returns what is taken from counts of 0, 1, 2 and more, by how many grams occur how often."""
    n1, n2, n3, n4 = np.maximum(1, [(count == times).sum() for times in (1, 2, 3, 4)])
    once = n1 / (n1 + 2 * n2)
    taken = [0, 1 - 2 * once * n2 / n1, 2 - 3 * once * n3 / n2, 3 - 4 * once * n4 / n3]
    return np.clip(taken, 0, [0, 1, 2, 3])
