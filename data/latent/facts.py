"""Lists of facts, some of which are asked for later: each is a letter and two digits.

Every fact is needed: the answers can be read from the list, and not be known without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_letters
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from contract import IGNORE, Arrays, Evaluator, Examples, RunSettings
from data.latent.asked import Answers, AskKeys, Said, asked
from data.latent.passages import PassageSpec, WithOthers, open_readers, read_all
from data.latent.readers import Passage, encode
from data.order import DrawnSource
from data.tokenizer import Bytes, FromFile, TextSpec, Tokenizer, train_bpe
from utils.command.marks import Keys
from utils.errors import ConfigError
from utils.noise import generator

SAMPLED = 1024  # lists by which byte pairs and lengths are found


def draw_lists(
    most: int, asked: int, count: int, rng: np.random.Generator, least: int | None = None
) -> list[Passage]:
    """Draws lists of `least` to `most` facts, by default of the most, and questions about some of
    their facts with the answers.
    """
    lists = []
    for _ in range(count):
        # letters and numbers are drawn independently: only the list tells which belong together
        facts = most if least is None else int(rng.integers(least, most + 1))
        keys = rng.permutation(list(ascii_letters))[:facts].tolist()
        values = [f"{value:02}" for value in rng.integers(100, size=facts).tolist()]
        # questions follow in another order than the list, and only the values are predicted
        pieces = []
        for fact in rng.permutation(facts)[:asked].tolist():
            pieces += [(f" {keys[fact]}", False), (values[fact], True)]
        listed = "".join(f" {key}{value}" for key, value in zip(keys, values, strict=True))
        lists.append((f"{listed};", pieces))
    return lists


class Sizes(Keys):
    """How large lists are."""

    facts: Annotated[int, Field(ge=1, le=len(ascii_letters))]
    """In a list"""

    asked: PositiveInt
    """Facts of each list that are asked for"""

    held_out: PositiveInt
    """Lists of an evaluation"""


class FactKeys(AskKeys, Sizes):
    """The keys of data=facts."""


class FactSource(DrawnSource):
    """Lists that latents replace, drawn anew in each step; the encoder reads bytes."""

    def __init__(self, run: RunSettings, keys: FactKeys) -> None:
        super().__init__(run, "facts")
        self._keys = keys
        sample = draw_lists(keys.facts, keys.asked, SAMPLED, generator(0, "lengths of facts"))
        self._readers = open_readers(keys.readers, sample)
        self.spec = PassageSpec(
            vocab_size=Bytes.vocab_size,
            seq_len=len(sample[0][0]),
            name="lists of facts",
            readers=tuple(reader.spec for reader in self._readers),
        )
        drawn = self.draw(keys.held_out, generator(0, "held-out facts"))
        own = asked(run, keys, Bytes(), self.spec.seq_len, self._readers)
        self._eval_sets = own or {"val": WithOthers(Examples(drawn))}

    def draw(self, rows: int, rng: np.random.Generator) -> Arrays:
        lists = draw_lists(self._keys.facts, self._keys.asked, rows, rng)
        passages = np.array(Bytes().encode([passage for passage, _ in lists]))
        return read_all(passages, lists, self._readers)

    def eval_sets(self) -> Mapping[str, Examples]:
        return self._eval_sets

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        return [(Answers if set_name == "answers" else Said)(self._readers)]


class FactTextKeys(Sizes):
    """The keys of data=fact_text."""

    tokenizer: Annotated[str, Field(pattern=r"bytes|bpe:\d+")]
    """bytes, or bpe:300 for so many byte pairs, found in such lists"""

    seq_len: PositiveInt
    """The longest list with its questions, in tokens"""

    least: PositiveInt
    """Facts in the shortest lists of training: short ones teach a net to look up"""

    def check(self) -> None:
        """Raises ConfigError for keys that do not go together."""
        if self.least > self.facts:
            raise ConfigError(
                f"data.least={self.least}: must not exceed data.facts={self.facts}, the longest"
            )


class FactText(DrawnSource):
    """The same lists for arch=gpt, which learns the answers alone."""

    def __init__(self, run: RunSettings, keys: FactTextKeys) -> None:
        super().__init__(run, "facts to read")
        keys.check()
        self._keys = keys
        # the same for every run, as vocabulary and lengths must not depend on its seed
        sample = draw_lists(keys.facts, keys.asked, SAMPLED, generator(0, "pairs of facts"))
        self._tokenizer: Tokenizer = Bytes()
        if keys.tokenizer != "bytes":
            texts = (f"{passage}{''.join(text for text, _ in after)}" for passage, after in sample)
            pairs = train_bpe(texts, int(keys.tokenizer.removeprefix("bpe:")), 1 << 24)
            self._tokenizer = FromFile("data.tokenizer", "pairs", content=pairs.encode())
        # a sample shows how long lists are in these tokens
        longest = max(len(ids) + len(text) for ids, text, _ in encode(self._tokenizer, sample))
        if longest > keys.seq_len:
            raise ConfigError(
                f"data.seq_len={keys.seq_len}: lists with their questions take up to {longest}"
                " tokens; give as many"
            )
        self.spec = TextSpec(
            vocab_size=self._tokenizer.vocab_size,
            seq_len=keys.seq_len,
            name="lists of facts",
            tokenizer=self._tokenizer,
        )
        drawn = self._rows(keys.held_out, generator(0, "held-out facts to read"), None)
        self._eval_sets = {"val": Examples(drawn)}

    def draw(self, rows: int, rng: np.random.Generator) -> Arrays:
        return self._rows(rows, rng, self._keys.least)

    def _rows(self, rows: int, rng: np.random.Generator, least: int | None) -> Arrays:
        keys = self._keys
        tokens = np.zeros((rows, keys.seq_len + 1), np.int32)
        labels = np.full_like(tokens, IGNORE)
        lists = draw_lists(keys.facts, keys.asked, rows, rng, least)
        for row, (passage, text, wanted) in enumerate(encode(self._tokenizer, lists)):
            # only answers have labels: the list and the questions are read
            end = min(len(passage) + len(text), keys.seq_len + 1)
            tokens[row, :end] = np.concatenate((passage, text))[:end]
            labels[row, len(passage) : end] = wanted[: end - len(passage)]
        return {"inputs": tokens[:, :-1], "labels": labels[:, 1:]}

    def eval_sets(self) -> Mapping[str, Examples]:
        return self._eval_sets
