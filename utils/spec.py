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
    table_rows: int = 0  # the number of puzzle identifiers, each with a row in the sparse table
    num_classes: int = 0
    num_features: int = 0  # the length of an example that is a vector
    image_shape: tuple[int, ...] = ()
    token_bytes: tuple[int, ...] = ()  # the bytes of text of each token, if known
    begin_token: int | None = None  # the token before a text
    # the most documents in a row, if attention should stay within them
    most_documents: int = field(default=0, compare=False)
    prompt_len: int = 0  # tokens of the longest question with its begin token and an answer
    # of the frozen language models that answer questions about the data, each with its own tokens
    language_models: tuple[Spec, ...] = ()
    fingerprint: str = ""
    # turns tokens into text
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False, repr=False)
    # truncates texts for a baseline, by the kind of cut: called with a text and the tokens or bytes
    # to keep, returns the model's tokens, and how many bytes of text they hold
    cuts: Mapping[str, Callable[[bytes, int], tuple[Sequence[int], int]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    # returns the tokenizer.json to publish with the net
    tokenizer: Callable[[], str] | None = field(default=None, compare=False, repr=False)
    name: str = field(default="the data", compare=False)  # shown to the user
    epoch: str = field(default="", compare=False)  # what an epoch visits, shown to the user
