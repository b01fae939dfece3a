"""Windows of tokens for training, and held-out windows that predict every token once."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from contract import IGNORE, Arrays, Examples
from data.language.token_files import Corpus
from utils.errors import ConfigError

# L is data.seq_len

SCANNED = 1 << 24  # tokens searched at once for the beginnings of documents


class Windows:
    """Consecutive windows of L + 1 tokens; the last token of one is the first of the next. The rest
    of a file is dropped.
    """

    most_documents = 0  # they are not told apart

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        self._corpus, self._files, self._length = corpus, corpus.files["train"], seq_len
        self._ends = np.cumsum([max(0, len(tokens) - 1) // seq_len for tokens in self._files])
        if not len(self):
            longest = max(len(tokens) for tokens in self._files)
            raise ConfigError(
                f"data.seq_len={seq_len}: {corpus.where}: the longest train file has {longest:,}"
                f" tokens; try {max(1, longest - 1)} or less"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> Arrays:
        out = np.empty((len(indices), self._length + 1), np.int32)
        # from the number of a window to its file and its place there
        file = np.searchsorted(self._ends, indices, side="right")
        within = indices - np.concatenate([[0], self._ends])[file]
        places = [*zip(file.tolist(), (within * self._length).tolist(), strict=True)]
        for row, (number, start) in enumerate(places):
            out[row] = self._files[number][start : start + self._length + 1]
        # one look at the whole batch is quicker than one at each row; a wrong token is rare
        if len(out) and out.view(np.uint32).max() >= self._corpus.vocab_size:
            for row, (number, start) in enumerate(places):
                self._corpus.check("train", number, start, out[row])
        return batch_of(out, None)


def batch_of(tokens: np.ndarray, begin: int | None) -> Arrays:
    """Returns inputs and labels of rows of L + 1 tokens; with `begin`, the token that begins a
    document, also the number of each input's document within its row.
    """
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    if begin is not None:
        batch["documents"] = np.cumsum(batch["inputs"] == begin, axis=1, dtype=np.int32)
    return batch


class HeldOut(Examples):
    """Windows of the held-out files. Each token but a file's first is predicted once, and at most
    `most` in all.
    """

    def __init__(
        self, corpus: Corpus, seq_len: int, most: int | None, begin: int | None = None
    ) -> None:
        self._corpus, self._files = corpus, corpus.files["val"]
        self._length, self._begin = seq_len, begin
        self._predictions: list[int] = []  # in each file
        # the budget is spent file by file, from the first on
        for tokens in self._files:
            count = max(0, len(tokens) - 1)
            if most is not None:
                count = min(count, most)
                most -= count
            self._predictions.append(count)
        self._ends = np.cumsum([-(-count // seq_len) for count in self._predictions])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: np.ndarray) -> Arrays:
        tokens = np.zeros((len(indices), self._length + 1), np.int32)
        counts = np.zeros((len(indices), 1), np.int64)
        for row, index in enumerate(indices.tolist()):
            # the file, and where in it the window starts; the last of a file is shorter
            number = int(np.searchsorted(self._ends, index, side="right"))
            start = (index - (int(self._ends[number - 1]) if number else 0)) * self._length
            counts[row] = count = min(self._length, self._predictions[number] - start)
            tokens[row, : count + 1] = self._files[number][start : start + count + 1]
            self._corpus.check("val", number, start, tokens[row])
        return self._cut(tokens, counts)

    def padding(self, rows: int) -> Arrays:
        nothing = np.zeros((rows, self._length + 1), np.int32)
        return self._cut(nothing, np.zeros((rows, 1), np.int64))

    def _cut(self, tokens: np.ndarray, counts: np.ndarray) -> Arrays:
        """Returns a batch whose rows predict so many tokens; what follows is one more document."""
        batch = batch_of(tokens, self._begin)
        counted = np.arange(self._length) < counts
        batch["labels"] = np.where(counted, batch["labels"], np.int32(IGNORE))
        if "documents" in batch:
            batch["documents"] = np.where(counted, batch["documents"], np.int32(0))
        return batch

    @cached_property
    def most_documents(self) -> int:
        """The largest number of documents in a window; what is left of one counts, too. 0 if they
        are not told apart.
        """
        if self._begin is None:
            return 0
        most = 1
        together = self._length * (SCANNED // self._length + 1)
        for tokens, count in zip(self._files, self._predictions, strict=True):
            # some whole windows at a time, as a file may be larger than memory
            for start in range(0, count, together):
                inputs = np.asarray(tokens[start : min(start + together, count)])
                # each begin token starts one more document, but for one that starts its window
                begins = np.flatnonzero(inputs == self._begin)
                inside = begins[begins % self._length > 0] // self._length
                full = len(inputs) % self._length == 0
                most = max(most, int(np.bincount(inside, minlength=1).max()) + 2 - full)
        return most
