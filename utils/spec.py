"""The facts about the data that a net needs: shapes, sizes and names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from utils.errors import ConfigError

IGNORE = -100  # label of all that counts in no loss and no metric: cells, tokens, padding rows


class MissingFact(ConfigError, AttributeError):
    """A net asks for a fact that the data at hand does not have."""


@dataclass(frozen=True)
class Spec:
    """Shapes and sizes that a source tells a net.

    A line of research whose data has other facts subclasses it beside its source:

        @dataclass(frozen=True)
        class SignalSpec(Spec):
            channels: int = 0

    Its nets then read `spec.channels`; with other data that is an error of one line.
    """

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
    # changes with the training data: a hash of its files, by data.files.content_hash. Data that is
    # drawn needs none: a run compares its first batch anyway
    fingerprint: str = ""
    # turns tokens into text
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False, repr=False)
    # returns the tokenizer.json to publish with the net
    tokenizer: Callable[[], str] | None = field(default=None, compare=False, repr=False)
    name: str = field(default="the data", compare=False)  # shown to the user

    def __getattr__(self, name: str) -> Any:
        """Called for facts that this data does not have."""
        if name.startswith("__"):  # copying and pickling ask for these
            raise AttributeError(name)
        raise MissingFact(
            f"the net needs `{name}`, which {self.name} does not have; use other data"
        )
