"""Questions about texts, for language models that see only an encoder's latents of a text.

The encoder gets a text's bytes; each model gets the question, and in evaluations the text, in
tokens of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt, with_config
from typing_extensions import Doc, TypedDict

from data.latent.answers import Answers
from data.latent.language_models import open_model
from data.latent.qa_examples import Cuts, Examples, Form, WithOthers
from data.latent.qa_files import Example, Sets, read_hub, read_path, split
from data.latent.stories import make_stories
from data.order import Order, cut_evenly, run_length, shard_rows
from data.source import Arrays, EvalSet, RunLength, RunSettings, Source, Spec
from data.tokenizer import check_encodes
from utils.command.marks import A_RUN, STRICT
from utils.errors import ConfigError
from utils.measure.evaluator import Evaluator


@dataclass(frozen=True)
class ReaderSpec(Spec):
    """A frozen language model that answers, with tokens of its own."""

    prompt_len: int = 0  # tokens of the longest question with its begin token and an answer
    # truncates texts for a baseline, by the kind of cut: called with a text and the tokens or bytes
    # to keep, returns the model's tokens, and how many bytes of text they hold
    cuts: Mapping[str, Callable[[bytes, int], tuple[Sequence[int], int]]] = field(
        default_factory=dict, compare=False, repr=False
    )


@dataclass(frozen=True)
class QuestionsSpec(Spec):
    """Texts with questions."""

    language_models: tuple[ReaderSpec, ...] = ()


def open_sets(
    run: RunSettings,
    hub: str | None,
    held_out: float,
    stories: Mapping[str, Any],
    skip: bool,
    all_words: bool = False,
) -> Sets:
    """Returns the examples with an answer, from files, from the hub, or generated.

    With `all_words`, training stories use the test stories' words, too.
    """
    data_path = run.data_path
    if data_path is not None and hub is not None:
        raise ConfigError(
            f"data.hub={hub} and data_path={data_path}: both say where questions are; give one"
        )
    if data_path is not None:
        where, sets = f"data_path={data_path}", read_path(data_path)
    elif hub is not None:
        where, sets = f"data.hub={hub}", read_hub(hub)
    else:
        where, sets = "data.stories", make_stories(run.seed, **stories, all_words=all_words)
    sets = {name: with_answers(examples, skip) for name, examples in sets.items()}
    if not any(sets.values()):
        raise ConfigError(f"{where}: holds no question with an answer; give one or more")
    if not sets["test"]:
        sets = split(sets["train"], held_out)
    if not sets["test"]:
        file = "a test.json beside train.json"
        raise ConfigError(
            f"data.held_out=0: {where}: nothing is left for testing; give 0.1, or {file}"
            if not held_out
            else f"{where}: all questions are about one text, and testing needs another; add one,"
            f" or {file}"
        )
    if not sets["train"]:
        if not run.eval_only:
            raise ConfigError(f"{where}: holds no question for training; add train.json")
        sets["train"] = sets["test"]  # only the shapes of a first batch are needed
    return sets


def with_answers(examples: Sequence[Example], skip: bool) -> list[Example]:
    """Returns the examples that have an answer. Raises ConfigError for others, unless `skip`."""
    answered = [example for example in examples if example.answers and example.answers[0]]
    if len(answered) < len(examples) and not skip:
        kept = {id(example) for example in answered}
        first = next(example for example in examples if id(example) not in kept)
        raise ConfigError(
            f"{first.where}: has no answer, or an empty one; give one, or add data.skip=true to"
            " leave such questions out"
        )
    return answered


@with_config(STRICT)
class FormKeys(TypedDict):
    """How models are shown a text, a question, and an answer with its end; \\n is a line end."""

    context: Annotated[str, Field(pattern=r"\{context\}")]
    question: Annotated[str, Field(pattern=r"\{question\}")]
    answer: Annotated[str, Field(pattern=r"\{answer\}(?s:.)")]


@with_config(STRICT)
class StoriesKeys(TypedDict):
    """Generated texts about who has what."""

    train: Annotated[PositiveInt, Doc("texts")]
    test: Annotated[
        PositiveInt,
        Doc("texts with a question each; their keys and values never occur in training"),
    ]
    facts: Annotated[int, Field(ge=1, le=1000), Doc("in each text")]
    least: Annotated[
        Annotated[int, Field(ge=1, le=1000)] | None,
        Doc("training texts have from so many to `facts` facts; null: always `facts`"),
    ]


# keys of both sources of questions
Hub = Annotated[
    str | None,
    Doc(
        "a dataset on the hub in SQuAD's layout; with neither this nor data_path, texts are"
        " generated"
    ),
]
HeldOutShare = Annotated[
    float, Field(ge=0, lt=1), Doc("share of texts for testing, where no test file is given")
]
Skip = Annotated[bool, Doc("leaves out what does not fit or has no answer, instead of refusing it")]


class QASource(Source):
    """Texts as bytes, and texts, questions and answers in the tokens of each answering model."""

    def __init__(
        self,
        run: RunSettings,
        *,
        hub: Hub,
        held_out: HeldOutShare,
        skip: Skip,
        models: Annotated[Sequence[str], A_RUN],
        context_bytes: Annotated[
            PositiveInt | None,
            Doc(
                "bytes of the longest text, which are the positions of the encoder; null: from "
                "the data"
            ),
        ],
        answer_tokens: Annotated[
            PositiveInt | None,
            Doc("tokens of the longest answer with its end, for each model; null: from the data"),
        ],
        at_once: Annotated[
            int,
            Field(ge=1, le=1000),
            Doc("questions about one text that training answers together, where there are as many"),
        ],
        form: FormKeys,
        stories: StoriesKeys,
    ) -> None:
        if not models:
            raise ConfigError(
                "arch.models=[]: names no net that answers; use arch=prefix, and give folders of"
                " runs of arch=gpt, or their arguments"
            )
        self._run, self._form = run, Form(**form)
        self._models = [
            open_model(f"arch.models[{number}]", path) for number, path in enumerate(models)
        ]
        sets = open_sets(run, hub, held_out, stories, skip)
        texts = [example.context for some in sets.values() for example in some]
        for model in self._models:
            check_encodes(model.where, model.tokenizer, texts)
        self._sets = {name: Examples(some, self._form, self._models) for name, some in sets.items()}
        longest = max(some.longest_answer for some in self._sets.values())
        context_bytes = context_bytes or max(some.longest_text for some in self._sets.values())
        answer_width = answer_tokens or max(1, longest)
        for some in self._sets.values():
            some.fit(context_bytes, answer_width, skip)
        self._at_once, self._rows = at_once, self._sets["train"].together(at_once)
        self._order = Order(run.seed, np.arange(max(1, len(self._rows))))
        self._steps = cut_evenly(
            self._order.items, run.global_batch_size, run.epochs, run.eval_interval
        )
        shown = [
            (each.context, each.question, each.answers)
            for some in self._sets.values()
            for each in some.examples
        ]
        cuts = [Cuts(self._form, each.tokenizer) for each in self._models]
        specs = [
            ReaderSpec(
                vocab_size=each.vocab_size,
                seq_len=each.seq_len,
                begin_token=each.begin,
                decode=each.tokenizer.decode,
                name=each.where,
                token_bytes=each.tokenizer.token_bytes,
                prompt_len=max(some.longest_prompt(number) for some in self._sets.values()),
                cuts={"first": cuts[number].by_tokens, "cut": cuts[number].by_bytes},
            )
            for number, each in enumerate(self._models)
        ]
        self.spec = QuestionsSpec(
            seq_len=context_bytes,
            language_models=tuple(specs),
            name=(run.data_path or hub or "made-up stories")
            + ("" if answer_tokens else f", answers of up to {answer_width} tokens"),
            fingerprint=hashlib.sha256(
                repr((sorted(form.items()), shown)).encode(errors="surrogatepass")
            ).hexdigest(),
        )

    @cached_property
    def length(self) -> RunLength:
        run = self._run
        return run_length(self._steps, run.global_batch_size, run.max_steps, run.eval_every_steps)

    def train_batch(self, step: int, shard: int) -> Arrays:
        """Returns the rows of one shard of one step: texts, each with its questions."""
        visits = shard_rows(self._order.visits(*self._steps.span(step)), shard, self._run.shards)
        return self._sets["train"].read_together(
            [self._rows[visit] for visit in visits], self._at_once
        )

    def eval_sets(self) -> Mapping[str, EvalSet]:
        return {"test": WithOthers(self._sets["test"])}

    def evaluators(self, set_name: str) -> Sequence[Evaluator]:
        return [
            Answers(
                self._sets["test"].examples,
                [each.tokenizer.decode for each in self._models],
                self._form.end,
            )
        ]
