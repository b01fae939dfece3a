"""What a model must know of its data, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

IGNORE = -100  # label of cells and rows that count in no loss and no metric


@dataclass(frozen=True)
class Spec:
    """Shapes and sizes that a source tells a net."""

    vocab_size: int = 0
    seq_len: int = 0
    table_rows: int = 0  # how many identifiers examples may have, each with a row of its own in a table
    num_classes: int = 0
    num_features: int = 0  # numbers of an example
    image_shape: tuple[int, ...] = ()
    token_bytes: tuple[int, ...] = ()  # of text behind each token, where that is known
    fingerprint: str = ""
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False, repr=False)  # tokens as text
    name: str = field(default="the data", compare=False)  # for people
