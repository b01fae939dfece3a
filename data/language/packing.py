"""Packs whole documents, and pieces of those that are too long, into windows. Every token of a file
but the last is an input of exactly one window.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from contract import IGNORE, Arrays
from data.language.token_files import Corpus
from data.language.windows import SCANNED
from utils.errors import ConfigError

# L is data.seq_len


class PackedWindows:
    """Windows of at most L inputs. A longer document is cut into pieces of L and a rest. Rests and
    shorter documents are packed by best-fit decreasing (Ding et al. 2024, arXiv 2404.10830). The
    last token of a document predicts the begin token that follows it.
    """

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        assert corpus.begin is not None
        self._corpus, self._files, self._length = corpus, corpus.files["train"], seq_len
        self._vocab = corpus.vocab_size
        pieces_of_files = [pieces_of(tokens, corpus.begin, seq_len) for tokens in self._files]
        starts, lengths = (np.concatenate(parts) for parts in zip(*pieces_of_files, strict=True))
        windows = best_fit(lengths, seq_len)
        order = np.argsort(windows, kind="stable")  # the pieces, window by window
        self._starts, self._sizes = starts[order], lengths[order].astype(np.int32)
        file_of = np.repeat(
            np.arange(len(pieces_of_files)), [len(of_file) for of_file, _ in pieces_of_files]
        )
        self._file_of = file_of.astype(np.int32)[order]
        self.count = int(windows.max(initial=-1)) + 1
        pieces = np.bincount(windows, minlength=self.count)
        self._ends = np.cumsum(pieces)
        filled = np.bincount(windows, lengths, minlength=self.count)
        # what is left of a window counts as a document, too
        self.most_documents = int((pieces + (filled < seq_len)).max(initial=0))
        if not lengths.sum():
            raise ConfigError(
                f"data.documents=true: {corpus.where}: no train file has two tokens; build it again"
            )

    def read(self, windows: np.ndarray) -> Arrays:
        """Returns inputs, labels, and the number within its row of each input's document."""
        inputs, labels = np.full((2, len(windows), self._length), self._corpus.begin, np.int32)
        documents = np.zeros_like(inputs)
        holes = []
        for row, window in enumerate(windows.tolist()):
            filled = 0
            for number, (file, start, length) in enumerate(self._pieces(window), 1):
                stop = filled + length
                tokens = self._files[file][start : start + length + 1]
                inputs[row, filled:stop], labels[row, filled:stop] = tokens[:-1], tokens[1:]
                documents[row, filled:stop] = number
                filled = stop
            holes.append(filled)
        if max(read.view(np.uint32).max(initial=0) for read in (inputs, labels)) >= self._vocab:
            self._check(windows)
        for row, filled in enumerate(holes):
            labels[row, filled:] = IGNORE
        return {"inputs": inputs, "labels": labels, "documents": documents}

    def _pieces(self, window: int) -> Iterator[tuple[int, int, int]]:
        """Yields the file, the first token and the number of inputs of each piece."""
        pieces = slice(int(self._ends[window - 1]) if window else 0, int(self._ends[window]))
        columns = (column[pieces].tolist() for column in (self._file_of, self._starts, self._sizes))
        return zip(*columns, strict=True)

    def _check(self, windows: np.ndarray) -> None:
        for window in windows.tolist():
            for file, start, length in self._pieces(window):
                tokens = self._files[file][start : start + length + 1]
                self._corpus.check("train", file, start, tokens.astype(np.uint32))


def pieces_of(tokens: np.ndarray, begin: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the pieces of a file's documents start, and how many inputs each has.

    Tokens before the first begin token are the end of a document that begins in another file.
    """
    cuts_of_documents = [
        piece + np.flatnonzero(tokens[piece : piece + SCANNED] == begin)
        for piece in range(0, len(tokens), SCANNED)
    ]
    last = max(0, len(tokens) - 1)
    cuts = np.unique(np.concatenate([[0, last], *cuts_of_documents]))
    sizes = np.diff(cuts)
    pieces = -(-sizes // seq_len)  # of each document
    # the number of each piece within its document
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(cuts[:-1], pieces) + number * seq_len
    return starts, np.minimum(np.repeat(sizes, pieces) - number * seq_len, seq_len)


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """Returns the window of each piece. Pieces are placed from the longest to the shortest, each in
    the fullest window that has room for it. Pieces of one length are placed together.
    """
    order = np.argsort(-lengths, kind="stable")
    placed = np.empty(len(lengths), np.int64)
    left: dict[int, list[np.ndarray]] = {}  # windows by the room left in them
    rooms: list[int] = []  # the keys of `left`, ascending
    made = 0

    def put(windows: np.ndarray, room_left: int) -> None:
        if room_left and len(windows):
            if room_left not in left:
                insort(rooms, room_left)
                left[room_left] = []
            left[room_left].append(windows)

    sizes, firsts = np.unique(-lengths[order], return_index=True)
    # without pieces there are no sizes, but one group of none
    for length, group in zip(-sizes, np.split(order, firsts[1:]), strict=False):
        while len(group):
            at = bisect_left(rooms, length)
            if at < len(rooms):
                here = rooms.pop(at)
                windows = np.concatenate(left.pop(here))
            else:
                here, new = room, -(-len(group) // (room // length))
                windows, made = np.arange(made, made + new), made + new
            each = here // length
            full, rest = divmod(min(len(group), len(windows) * each), each)
            now, group = np.split(group, [full * each + rest])
            placed[now] = np.repeat(windows, each)[: len(now)]
            put(windows[:full], here - each * length)
            put(windows[full : full + bool(rest)], here - rest * length)
            put(windows[full + bool(rest) :], here)
    return placed
