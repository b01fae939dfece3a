"""Windows of tokens in files: those that training visits, and held-out ones of which every token is
predicted once.
"""

from __future__ import annotations

import numpy as np

from data.language.token_files import Corpus
from data.source import IGNORE, Arrays
from utils.errors import ConfigError

# L is data.seq_len

SCANNED = 1 << 24  # tokens looked at together while documents are sought


class Windows:
    """Windows of L + 1 tokens, one behind the other, the last token of each the first of the next;
    what is left in a file is dropped.

    With `aligned` each begins at a begin token, the first that stands behind the window before.
    """

    def __init__(self, corpus: Corpus, seq_len: int, aligned: bool = False) -> None:
        self._corpus, self._files, self._length = corpus, corpus.files["train"], seq_len
        self._starts = (
            [aligned_starts(tokens, corpus.begin, seq_len) for tokens in self._files]
            if aligned and corpus.begin is not None
            else []
        )
        counts = (
            [len(starts) for starts in self._starts]
            if aligned
            else [max(0, len(tokens) - 1) // seq_len for tokens in self._files]
        )
        self._ends = np.cumsum(counts)
        self.count = int(self._ends[-1])
        if not self.count:
            longest = max(len(tokens) for tokens in self._files) - 1
            what = (
                "no document of the train files begins where so many tokens and one more follow"
                if aligned
                else ""
            )
            raise ConfigError(
                f"data.seq_len={seq_len}: {corpus.where}:"
                f" {what or f'the longest train file has {longest + 1:,} tokens'}; try"
                f" {max(1, longest // 2 if aligned else longest)} or less"
            )

    def read(self, windows: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """These windows' tokens into these rows of `out`, which are L + 1 wide."""
        file = np.searchsorted(self._ends, windows, side="right")
        inside = windows - np.concatenate([[0], self._ends])[file]
        for row, number, place in zip(rows.tolist(), file.tolist(), inside.tolist(), strict=True):
            start = self._start(number, place)
            out[row] = self._files[number][start : start + self._length + 1]
        # only some blocks of a file are looked at when it is opened
        read = out if len(rows) == len(out) else out[rows]
        if len(read) and read.view(np.uint32).max() >= self._corpus.vocab_size:
            for row, number, place in zip(rows, file.tolist(), inside.tolist(), strict=True):
                self._corpus.check("train", number, self._start(number, place), out[row])

    def _start(self, file: int, window: int) -> int:
        return int(self._starts[file][window]) if self._starts else window * self._length


def aligned_starts(tokens: np.ndarray, begin: int | None, seq_len: int) -> np.ndarray:
    """Where windows begin that each begin with a document, none within another."""
    pieces = [
        piece + np.flatnonzero(tokens[piece : piece + SCANNED] == begin)
        for piece in range(0, len(tokens), SCANNED)
    ]
    found = np.concatenate([np.empty(0, np.int64), *pieces])
    found = found[: np.searchsorted(found, len(tokens) - seq_len)]
    following = np.searchsorted(found, found + seq_len).tolist()
    starts, place = [], 0
    while place < len(found):
        starts.append(place)
        place = following[place]
    return found[starts] if starts else found[:0]


def batch_of(tokens: np.ndarray, begin: int | None) -> Arrays:
    """Inputs and labels of rows of L + 1 tokens; with `begin` also whose document each input
    belongs to, within the row.
    """
    inputs = tokens[:, :-1]
    batch = {"inputs": inputs, "labels": tokens[:, 1:]}
    return (
        batch
        if begin is None
        else batch | {"documents": np.cumsum(inputs == begin, axis=1, dtype=np.int32)}
    )


class HeldOut:
    """The first so many predictions of the held-out files: windows from file to file, each token
    but a file's first predicted once.
    """

    def __init__(
        self, corpus: Corpus, seq_len: int, most: int | None, begin: int | None = None
    ) -> None:
        self._corpus, self._files = corpus, corpus.files["val"]
        self._length, self._begin = seq_len, begin
        self._predictions = []  # in each file
        for tokens in self._files:
            self._predictions.append(
                max(0, len(tokens) - 1 if most is None else min(len(tokens) - 1, most))
            )
            most = None if most is None else most - self._predictions[-1]
        self._ends = np.cumsum([-(-count // seq_len) for count in self._predictions])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: np.ndarray) -> Arrays:
        tokens = np.zeros((len(indices), self._length + 1), np.int32)
        counts = np.zeros((len(indices), 1), np.int64)
        for row, index in enumerate(indices.tolist()):
            number = int(np.searchsorted(self._ends, index, side="right"))
            start = (index - (int(self._ends[number - 1]) if number else 0)) * self._length
            counts[row] = count = min(self._length, self._predictions[number] - start)
            tokens[row, : count + 1] = self._files[number][start : start + count + 1]
            self._corpus.check("val", number, start, tokens[row])
        batch = batch_of(tokens, self._begin)
        batch["labels"] = np.where(
            np.arange(self._length) < counts, batch["labels"], np.int32(IGNORE)
        )
        return batch

    def padding(self, rows: int) -> Arrays:
        batch = batch_of(np.zeros((rows, self._length + 1), np.int32), self._begin)
        return batch | {"labels": np.full((rows, self._length), IGNORE, np.int32)}
