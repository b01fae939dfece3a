"""Packs whole documents, and pieces of those that are too long, into windows. Every token of a file
but the last is an input of exactly one window.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from contract import IGNORE, Arrays
from data.language.token_files import Corpus
from data.language.windows import SCANNED
from utils.errors import ConfigError

# L is data.seq_len, P the number of pieces


class PackedWindows:
    """Windows of at most L inputs. A longer document is cut into pieces of L and a rest. Rests and
    shorter documents are packed by best-fit decreasing (Ding et al. 2024, arXiv 2404.10830). The
    last token of a document predicts the begin token that follows it.
    """

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        assert corpus.begin is not None
        self._corpus, self._files, self._length = corpus, corpus.files["train"], seq_len
        files, starts, lengths = [], [], []
        # every document of every file, cut into pieces that fit a window
        for number, tokens in enumerate(self._files):
            file_starts, file_lengths = pieces_of(tokens, corpus.begin, seq_len)
            files.append(np.full(len(file_starts), number, np.int32))
            starts.append(file_starts)
            lengths.append(file_lengths)
        length_P = np.concatenate(lengths)
        if not length_P.sum():
            raise ConfigError(
                f"data.documents=true: {corpus.where}: no train file has two tokens; build it again"
            )
        window_P = best_fit(length_P, seq_len)
        # the file, first token and length of each piece, window by window
        order = np.argsort(window_P, kind="stable")
        self._file, self._start = np.concatenate(files)[order], np.concatenate(starts)[order]
        self._size = length_P[order].astype(np.int32)
        pieces = np.bincount(window_P)  # in each window
        self._ends = np.cumsum(pieces)  # where the pieces of each window end
        # what is left of a window counts as a document, too
        filled = np.bincount(window_P, length_P)
        self.most_documents = int((pieces + (filled < seq_len)).max())

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, indices: np.ndarray) -> Arrays:
        """Returns inputs, labels, and the number within its row of each input's document."""
        # until the end, what is left of a window holds begin tokens, which are in the vocabulary
        inputs, labels = np.full((2, len(indices), self._length), self._corpus.begin, np.int32)
        documents = np.zeros_like(inputs)
        # each piece brings its own labels, so that none predicts the next piece of the window
        for row, window in enumerate(indices.tolist()):
            filled = 0
            for number, (file, start, size) in enumerate(self._pieces(window), 1):
                tokens = self._files[file][start : start + size + 1]
                inputs[row, filled : filled + size] = tokens[:-1]
                labels[row, filled : filled + size] = tokens[1:]
                documents[row, filled : filled + size] = number
                filled += size
        # one check of the batch; only a wrong token is worth locating
        largest = max(tokens.view(np.uint32).max(initial=0) for tokens in (inputs, labels))
        if largest >= self._corpus.vocab_size:
            self._check(indices)
        labels[documents == 0] = IGNORE
        return {"inputs": inputs, "labels": labels, "documents": documents}

    def _pieces(self, window: int) -> list[tuple[int, int, int]]:
        """Returns the file, the first token and the number of inputs of each piece."""
        pieces = slice(self._ends[window - 1] if window else 0, self._ends[window])
        columns = (self._file[pieces], self._start[pieces], self._size[pieces])
        return [*zip(*(column.tolist() for column in columns), strict=True)]

    def _check(self, indices: np.ndarray) -> None:
        for window in indices.tolist():
            for file, start, size in self._pieces(window):
                tokens = self._files[file][start : start + size + 1]
                self._corpus.check("train", file, start, tokens.astype(np.uint32))


def pieces_of(tokens: np.ndarray, begin: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the pieces of a file's documents start, and how many inputs each has.

    Tokens before the first begin token are the end of a document that begins in another file.
    """
    # a document reaches from one begin token to the next; a file's last token is only predicted
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
    the fullest window that has room for it.

    A corpus has millions of pieces, of at most `room` lengths, so all pieces of one length are
    placed together: windows with as much room left are filled alike.
    """
    placed = np.empty(len(lengths), np.int64)
    windows_by_room: dict[int, list[np.ndarray]] = {}
    rooms: list[int] = []  # the keys of `windows_by_room`, ascending
    made = 0

    def keep(windows: np.ndarray, room_left: int) -> None:
        if not room_left or not len(windows):
            return
        if room_left not in windows_by_room:
            insort(rooms, room_left)
            windows_by_room[room_left] = []
        windows_by_room[room_left].append(windows)

    # from the longest to the shortest, all pieces of one length together
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    # without pieces there are no sizes, but one group of none
    for length, group in zip((-sizes).tolist(), np.split(order, firsts[1:]), strict=False):
        while len(group):
            # the windows with the least room that is enough, or new ones
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room_here = rooms.pop(at)
                windows = np.concatenate(windows_by_room.pop(room_here))
            else:
                room_here, new = room, -(-len(group) // (room // length))
                windows, made = np.arange(made, made + new), made + new

            # fill one after the other with as many pieces as fit; the last may get fewer
            fitting = room_here // length
            taken = min(len(group), len(windows) * fitting)
            full, rest = divmod(taken, fitting)
            placed[group[:taken]] = np.repeat(windows, fitting)[:taken]
            group = group[taken:]

            # the windows that are now full, the one filled in part, and those not touched go back
            # by their room
            partly = full + (rest > 0)
            keep(windows[:full], room_here - fitting * length)
            keep(windows[full:partly], room_here - rest * length)
            keep(windows[partly:], room_here)
    return placed
