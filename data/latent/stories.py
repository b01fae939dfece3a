"""Generates texts of keys and values, and questions about them. Held-out keys and values never
occur in training.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from data.latent.qa_files import Example, Sets
from data.order import generator
from utils.errors import ConfigError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WHAT = "cupboard"
KEYS = tuple(a + b for a in LETTERS for b in LETTERS)
VALUES = tuple(f"{number:02}" for number in range(100))
HELD_OUT = 5  # one word in five


def make_stories(
    seed: int, train: int, test: int, facts: int, least: int | None = None, all_words: bool = False
) -> Sets:
    """Generates `train` and `test` texts of `facts` facts each; with `least`, training texts have
    `least` to `facts`. A training text has a question about every fact, a test text about one.

    No value occurs twice in a text if there are enough values. With `all_words`, held-out words
    occur in training, too, as a language model knows all words of its language.
    """
    sets: Sets = {}
    for name, count in (("train", train), ("test", test)):
        keys, values = (
            _words(words, name == "test", all_words and name == "train") for words in (KEYS, VALUES)
        )
        if facts > len(keys):
            raise ConfigError(
                f"data.stories.facts={facts}: at most {len(keys)}, as no key occurs twice in a"
                " text; give fewer"
            )
        if least is not None and least > facts:
            raise ConfigError(
                f"data.stories.least={least}: is more than data.stories.facts={facts}, which are"
                " the most"
            )
        draw = generator(seed, f"stories, {name}, {len(keys)} words")
        sets[name] = []
        for number in range(count):
            some = (
                facts if name == "test" or least is None else int(draw.integers(least, facts + 1))
            )
            twice = some > len(values)
            chosen = list(
                zip(_some(draw, keys, some), _some(draw, values, some, twice), strict=True)
            )
            text = " ".join(f"{WHAT}{key}{value}" for key, value in chosen)
            asked = [
                chosen[index] for index in draw.permutation(some)[: 1 if name == "test" else some]
            ]
            sets[name] += [
                Example(
                    text,
                    f"{WHAT}{key}",
                    (value,),
                    f"story {number} of {name}",
                    information(some, twice),
                )
                for key, value in asked
            ]
    return sets


def information(facts: int, twice: bool = False) -> float:
    """Returns the bits that tell a text from all others of as many facts. With `twice`, a value may
    occur more than once.
    """
    keys = sum(math.log2(len(KEYS) - fact) for fact in range(facts))
    return keys + sum(math.log2(len(VALUES) - (0 if twice else fact)) for fact in range(facts))


def _words(words: tuple[str, ...], held_out: bool, everything: bool) -> list[str]:
    return [
        word
        for word in words
        if everything or (zlib.crc32(word.encode()) % HELD_OUT == 0) == held_out
    ]


def _some(draw: np.random.Generator, of: list[str], count: int, twice: bool = False) -> list[str]:
    return [of[index] for index in draw.choice(len(of), count, replace=twice)]
