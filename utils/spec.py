"""The facts about the data that a model needs: shapes, sizes and names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

IGNORE = -100  # label of cells and rows that count in no loss and no metric


@dataclass(frozen=True)
class Spec:
    """Shapes and sizes that a source tells a net."""

    vocab_size: int = 0
    seq_len: int = 0
    # how many identifiers examples may have, each with a row of its own in a table
    table_rows: int = 0
    num_classes: int = 0
    num_features: int = 0  # numbers of an example
    image_shape: tuple[int, ...] = ()
    token_bytes: tuple[int, ...] = ()  # of text behind each token, where that is known
    begin_token: int | None = None  # what stands before a text
    prompt_len: int = 0  # of the longest question with its begin token, and room for an answer
    # frozen language models that answer questions about the data, each in tokens of its own
    language_models: tuple[Spec, ...] = ()
    fingerprint: str = ""
    # tokens as text
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False, repr=False)
    # how this model would be shown a truncated text, by the kind of cut: a text and the number of
    # tokens or bytes to keep give the tokens, and the bytes of text in them
    cuts: Mapping[str, Callable[[bytes, int], tuple[Sequence[int], int]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    # the tokenizer.json for others who use the net
    tokenizer: Callable[[], str] | None = field(default=None, compare=False, repr=False)
    name: str = field(default="the data", compare=False)  # for people
    epoch: str = field(default="", compare=False)  # what an epoch visits of it, for people
