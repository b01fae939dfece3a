"""Converts questions to arrays: texts as bytes, and all that models read in their own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from data.latent.language_models import LanguageModel
from data.latent.qa_files import Example
from data.source import Arrays
from data.tokenizer import Tokenizer
from utils.errors import ConfigError
from utils.spec import IGNORE

EMPTY = IGNORE  # beyond a row's end


class Ragged:
    """Rows of different lengths in one array, read padded to one length."""

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._values = (
            np.concatenate([np.asarray(row, np.int32) for row in rows])
            if len(rows)
            else np.zeros(0, np.int32)
        )
        self.longest = int(self.lengths.max(initial=0))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, index: int) -> np.ndarray:
        """Returns one row, without padding."""
        return self._values[self._starts[index] : self._starts[index + 1]]

    def read(self, indices: np.ndarray, width: int) -> np.ndarray:
        """Returns these rows, each cut or padded with EMPTY to `width`."""
        starts, stops = self._starts[indices, None], self._starts[indices + 1, None]
        positions = starts + np.arange(width)
        inside = positions < stops
        values = (
            self._values[np.where(inside, positions, 0)]
            if len(self._values)
            else np.zeros_like(positions)
        )
        return np.where(inside, values, EMPTY).astype(np.int32)


class Form:
    """How a model is shown a text, a question and an answer; \\n in the form is a line end."""

    def __init__(self, context: str, question: str, answer: str) -> None:
        context, self._question, self._answer = (
            part.replace("\\n", "\n") for part in (context, question, answer)
        )
        self.before, _, self.after = context.partition("{context}")
        self.end = self._answer.partition("{answer}")[2]  # the text that ends an answer

    def text(self, text: str) -> str:
        """Returns a text as models see it."""
        return f"{self.before}{text}{self.after}"

    def asked(self, example: Example) -> tuple[str, str]:
        """Returns a question and the answer to learn, as models see them."""
        question = self._question.replace("{question}", example.question)
        return question, self._answer.replace("{answer}", example.answers[0])


class Tokens:
    """The tokens that one language model sees."""

    def __init__(
        self, examples: Sequence[Example], texts: Sequence[str], form: Form, tokenizer: Tokenizer
    ) -> None:
        shown = [form.asked(example) for example in examples]
        self.contexts = Ragged(tokenizer.encode([form.text(text) for text in texts]))
        self.questions = Ragged(tokenizer.encode([question for question, _ in shown]))
        self.answers = Ragged(tokenizer.encode([answer for _, answer in shown]))


class Cuts:
    """Truncated texts as a model without an encoder reads them. What the form puts after a text
    follows the cut, too.
    """

    def __init__(self, form: Form, tokenizer: Tokenizer) -> None:
        self._form, self._tokenizer = form, tokenizer

    def by_bytes(self, text: bytes, most: int) -> tuple[list[int], int]:
        """Returns the tokens of a text's first bytes, at most `most`, and how many bytes they are.

        A character is kept whole or not at all.
        """
        uncut, kept = self._shown(text), min(most, len(text))
        while True:
            while 0 < kept < len(text) and text[kept] & 0xC0 == 0x80:  # within a character
                kept -= 1
            tokens = self._shown(text[:kept])
            # a word that is cut may take more tokens than the whole word, and only the uncut text
            # is sure to fit into the model
            if len(tokens) <= len(uncut) or not kept:
                return tokens, kept
            kept -= 1

    def by_tokens(self, text: bytes, most: int) -> tuple[list[int], int]:
        """Returns the first `most` tokens of form and text, and how many of the text's bytes
        they hold.
        """
        tokens = self._encoded(self._form.before + text.decode())
        if len(tokens) <= most:
            return self._shown(text), len(text)
        kept = tokens[:most]
        size = sum(self._tokenizer.token_bytes[token] for token in kept)
        size -= len(self._form.before.encode())
        return kept + self._encoded(self._form.after), min(max(size, 0), len(text))

    def _shown(self, text: bytes) -> list[int]:
        return self._encoded(self._form.text(text.decode()))

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode([text])[0].tolist()  # type: ignore[no-any-return]


class Examples:
    """A set of examples, read by index."""

    def __init__(
        self, examples: Sequence[Example], form: Form, models: Sequence[LanguageModel]
    ) -> None:
        texts = list(dict.fromkeys(example.context for example in examples))
        number = {text: number for number, text in enumerate(texts)}
        self._text_of = np.array([number[example.context] for example in examples], np.int64)
        self._bytes = Ragged([np.frombuffer(text.encode(), np.uint8) for text in texts])
        self._tokens = [Tokens(examples, texts, form, model.tokenizer) for model in models]
        self._models = models
        self.examples = list(examples)
        self.longest_text = max(1, self._bytes.longest)  # in bytes
        self.longest_answer = max((tokens.answers.longest for tokens in self._tokens), default=0)

    def fit(self, context_bytes: int, answer_tokens: int, skip: bool) -> Examples:
        """Sets the largest sizes of a text and an answer. Refuses larger examples, or leaves them
        out with `skip`. Called once, before `read`.
        """
        self._context_bytes, self._answer_tokens = context_bytes, answer_tokens
        fits, problem = np.ones(len(self.examples), bool), ""
        for sizes, most, message in self._limits():
            fits &= sizes <= most
            if not problem and (sizes > most).any():
                where = self.examples[int(sizes.argmax())].where
                problem = f"{message.format(size=sizes.max())} ({where})"
        fitting = np.flatnonzero(fits)
        if problem and not (skip and len(fitting)):
            way_out = (
                f"add data.skip=true, which leaves out {len(fits) - len(fitting)}"
                if len(fitting)
                else "data.skip=true leaves none of them"
            )
            raise ConfigError(f"{problem}; {way_out}")
        self._places = fitting
        self.examples = [self.examples[index] for index in fitting]
        return self

    def __len__(self) -> int:
        return len(self._places)

    def read(self, indices: np.ndarray) -> Arrays:
        """Returns examples: the bytes of their texts, and the tokens of texts, questions and
        answers for each model.
        """
        places = self._places[indices]
        texts = self._text_of[places]
        arrays = {"context": self._bytes.read(texts, self._context_bytes)}
        for number, tokens in enumerate(self._tokens):
            arrays[f"context_{number}"] = tokens.contexts.read(texts, tokens.contexts.longest)
            arrays[f"question_{number}"] = tokens.questions.read(places, tokens.questions.longest)
            arrays[f"answer_{number}"] = tokens.answers.read(places, self._answer_tokens)
        return arrays

    def together(self, most: int) -> list[np.ndarray]:
        """Returns the indices of examples about the same text, in groups of at most `most`."""
        about: dict[int, list[int]] = {}
        for index, text in enumerate(self._text_of[self._places].tolist()):
            about.setdefault(text, []).append(index)
        return [
            np.array(some[first : first + most])
            for some in about.values()
            for first in range(0, len(some), most)
        ]

    def read_together(self, rows: Sequence[np.ndarray], most: int) -> Arrays:
        """Returns a row for each group: its text, and its questions and answers, padded with EMPTY
        to `most`.
        """
        arrays = self.read(np.concatenate(rows))
        firsts = np.cumsum([0, *(len(row) for row in rows[:-1])])
        made = {}
        for name, array in arrays.items():
            if name.startswith("context"):
                made[name] = array[firsts]
            else:
                made[name] = np.full((len(rows), most, array.shape[1]), EMPTY, np.int32)
                for row, (first, some) in enumerate(zip(firsts, rows, strict=True)):
                    made[name][row, : len(some)] = array[first : first + len(some)]
        return made

    def padding(self, rows: int) -> Arrays:
        shapes = {name: array.shape[1] for name, array in self.read(np.zeros(0, np.int64)).items()}
        return {name: np.full((rows, width), EMPTY, np.int32) for name, width in shapes.items()}

    def longest_prompt(self, number: int) -> int:
        """Returns the tokens of one model's longest prompt: a begin token, the longest question,
        and room for an answer.
        """
        return 1 + self._tokens[number].questions.longest + self._answer_tokens

    def _limits(self) -> Iterator[tuple[np.ndarray, int, str]]:
        """Yields what may be too long: the sizes of all examples, the limit, and a message."""
        yield (
            self._bytes.lengths[self._text_of],
            self._context_bytes,
            f"data.context_bytes={self._context_bytes}: the longest text has {{size}} bytes; give"
            " {size}",
        )
        for model, tokens in zip(self._models, self._tokens, strict=True):
            yield (
                tokens.answers.lengths,
                self._answer_tokens,
                f"data.answer_tokens={self._answer_tokens}: the longest answer has {{size}} tokens,"
                " its end included; give {size}, or null",
            )
            texts = tokens.contexts.lengths[self._text_of]
            yield (
                1 + texts + tokens.questions.lengths + self._answer_tokens,
                model.seq_len,
                f"{model.where}: reads {model.seq_len} tokens at once, but the longest text with"
                " its question and room for an answer has {size}",
            )


class WithOthers:
    """The same set; each example also has the text of the next one, as a wrong text."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, indices: np.ndarray) -> Arrays:
        others = self._examples.read((indices + 1) % max(1, len(self)))
        return {**self._examples.read(indices), "other": others["context"]}

    def padding(self, rows: int) -> Arrays:
        empty = self._examples.padding(rows)
        return {**empty, "other": empty["context"]}
