"""Questions about texts: from files of every layout, made up, as each model reads them, and what is
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.latent.answers import LABEL, Answers, deflated_size, exact, f1
from data.latent.language_models import LanguageModel
from data.latent.qa import open_sets
from data.latent.qa_examples import EMPTY, Cuts, Examples, Form, WithOthers
from data.latent.qa_files import Example, read_path, split
from data.latent.qa_text import QAText
from data.latent.stories import make_stories
from data.source import RunSettings
from data.tokenizer import Bytes
from tests.making import make_source
from utils.errors import ConfigError
from utils.latent import ANSWER_INPUTS, WIRES
from utils.measure.evaluator import Prediction, Report

FORM = {"context": "{context}\\n", "question": "{question}", "answer": "{answer}\\n"}
STORIES = {"train": 20, "test": 10, "facts": 3}
SQUAD = {
    "data": [
        {
            "title": "x",
            "paragraphs": [
                {
                    "context": "Öl is here.",
                    "qas": [
                        {
                            "id": "q1",
                            "question": "Where?",
                            "answers": [{"text": " here "}, {"text": "it is"}],
                        }
                    ],
                },
                {
                    "context": "B.",
                    "qas": [
                        {"id": "q2", "question": "What?", "answers": [{"text": "B"}]},
                        {"id": "q3", "question": "Who?", "answers": []},
                    ],
                },
            ],
        }
    ]
}
ROWS: list[dict[str, Any]] = [
    {
        "context": "Öl is here.",
        "question": "Where?",
        "answers": {"text": ["here", "it is"], "answer_start": [7, 3]},
    },
    {"context": "B.", "question": "What?", "answers": ["B"]},
    {"context": "B.", "question": "Who?", "answers": []},
]


def written(path: Path, name: str, content: str) -> str:
    (path / name).write_text(content, encoding="utf-8")
    return str(path / name)


@pytest.mark.parametrize("layout", ["squad", "lines", "list"])
def test_every_layout_gives_the_same_questions(layout: str, tmp_path: Path) -> None:
    content = {
        "squad": json.dumps(SQUAD),
        "lines": "\n".join(map(json.dumps, ROWS)) + "\n\n",
        "list": json.dumps(ROWS),
    }[layout]
    path = written(tmp_path, "train.jsonl" if layout == "lines" else "train.json", content)
    sets = read_path(path)
    assert sets["test"] == []
    assert [(each.context, each.question, each.answers) for each in sets["train"]] == [
        ("Öl is here.", "Where?", ("here", "it is")), ("B.", "What?", ("B",)), ("B.", "Who?", ()),
    ]  # fmt: skip


def test_no_text_is_on_both_sides(tmp_path: Path) -> None:
    rows = [
        {"context": f"text {number // 3}", "question": f"{number}?", "answers": ["x"]}
        for number in range(3000)
    ]
    path = written(tmp_path, "all.jsonl", "\n".join(map(json.dumps, rows)))
    sets = split(read_path(path)["train"], held_out=0.2)
    texts = {name: {each.context for each in some} for name, some in sets.items()}
    assert not texts["train"] & texts["test"]
    assert 150 < len(texts["test"]) < 250
    assert len(sets["train"]) + len(sets["test"]) == 3000


def test_files_of_a_folder_are_told_by_their_names(tmp_path: Path) -> None:
    for name in ("squad-train.json", "dev.json", "notes.txt"):
        written(tmp_path, name, json.dumps([ROWS[name == "dev.json"]]))
    sets = read_path(str(tmp_path))
    assert [[each.question for each in sets[name]] for name in ("train", "test")] == [
        ["Where?"],
        ["What?"],
    ]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("train.json", "{", "train.json"),
        ("train.json", '{"rows": []}', "train.json"),
        ("train.jsonl", '{"context": "a", "question": "b", "answers": []}\n[1]', "line 2"),
        ("train.jsonl", '{"context": 3, "question": "b", "answers": []}', "line 1: context"),
        ("train.jsonl", '{"context": "a", "question": "b", "answers": [4]}', "line 1: answers"),
        ("dev.json", "[]", "no train.json"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    name: str, content: str, named: str, tmp_path: Path
) -> None:
    written(tmp_path, name, content)
    with pytest.raises(ConfigError) as error:
        read_path(str(tmp_path))
    assert str(error.value).startswith(f"data_path={tmp_path}")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_question_without_an_answer_is_refused_or_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "train.json", json.dumps(SQUAD))
    written(tmp_path, "test.json", json.dumps(ROWS[:2]))
    run = RunSettings(data_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"question 3: has no answer.* add data.skip=true"):
        open_sets(run, None, 0.1, STORIES, skip=False)
    sets = open_sets(run, None, 0.1, STORIES, skip=True)
    assert [len(some) for some in sets.values()] == [2, 2]
    with pytest.raises(
        ConfigError, match=r"nothing is left for testing; give 0\.1, or a test\.json"
    ):
        open_sets(RunSettings(data_path=path), None, 0.0, STORIES, skip=True)
    with pytest.raises(ConfigError, match="both say where questions are"):
        open_sets(RunSettings(data_path=path), "squad", 0.0, STORIES, skip=True)


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_a_small_file_is_split_so_that_it_can_run(held_out: float, tmp_path: Path) -> None:
    run = RunSettings(data_path=written(tmp_path, "train.json", json.dumps(ROWS)))
    sets = open_sets(run, None, held_out, STORIES, skip=True)
    assert sorted(len({each.context for each in some}) for some in sets.values()) == [1, 1]
    written(tmp_path, "train.json", json.dumps(ROWS[1:]))
    with pytest.raises(ConfigError, match="all questions are about one text, and testing need"):
        open_sets(run, None, held_out, STORIES, skip=True)


def test_keys_and_values_of_test_stories_never_occur_in_training() -> None:
    sets = make_stories(3, train=400, test=100, facts=4)
    words = {
        name: {
            word
            for each in some
            for fact in each.context.split()
            for word in (fact[8:10], fact[10:])
        }
        for name, some in sets.items()
    }
    assert not words["train"] & words["test"]
    assert len(sets["train"]) == 1600
    assert len(sets["test"]) == 100
    assert all(
        f"{each.question}{each.answers[0]}" in each.context.split()
        for some in sets.values()
        for each in some
    )
    assert words["test"] <= {
        word
        for each in make_stories(3, 2000, 1, 4, all_words=True)["train"]
        for fact in each.context.split()
        for word in (fact[8:10], fact[10:])
    }
    assert make_stories(3, 400, 100, 4) == sets
    assert make_stories(4, 400, 100, 4) != sets


def test_values_occur_twice_in_a_text_only_if_there_are_fewer_than_facts() -> None:
    for facts in (18, 19, 24):  # 18 of the 100 values are held out
        for each in make_stories(3, 1, 8, facts)["test"]:
            keys, values = zip(
                *((fact[8:10], fact[10:]) for fact in each.context.split()), strict=True
            )
            assert len(set(keys)) == facts
            assert (len(set(values)) == facts) == (facts == 18)
            ways = [(676 - fact) * (100 - (fact if facts == 18 else 0)) for fact in range(facts)]
            assert each.bits == pytest.approx(sum(map(math.log2, ways)))
    with pytest.raises(ConfigError, match=r"data.stories.facts=999: at most .*, as no key occurs"):
        make_stories(3, 1, 1, 999)


def examples(
    context_bytes: int = 30, answer_tokens: int = 5, skip: bool = False, seq_len: int = 99
) -> Examples:
    return Examples(
        make_stories(0, 2, 1, 2)["train"],
        Form(**FORM),
        [LanguageModel("arch.models[0]=x", Bytes(), 256, seq_len, 257)] * 2,
    ).fit(context_bytes, answer_tokens, skip)


SHOWN = {"context": "Read: {context}.\\n", "question": "{question}", "answer": "{answer}\\n"}
TEXT = "Öl, Öl und Öl"


@pytest.mark.parametrize(
    ("way", "most", "kept"),
    [("by_bytes", most, kept) for most, kept in ((0, ""), (1, ""), (2, "Ö"), (7, "Öl, Ö"))]
    + [
        ("by_tokens", most, kept)
        for most, kept in ((0, ""), (6, ""), (8, "Ö"), (19, "Öl, Öl und "))
    ]
    + [("by_bytes", 99, TEXT), ("by_tokens", 99, TEXT)],
)
def test_a_truncated_text_is_shown_as_a_whole_one_is(way: str, most: int, kept: str) -> None:
    tokens, size = getattr(Cuts(Form(**SHOWN), Bytes()), way)(TEXT.encode(), most)
    before = "Read: "[:most] if way == "by_tokens" else "Read: "
    assert Bytes().decode(tokens) == f"{before}{kept}.\n"
    assert size == len(kept.encode())


def test_a_cut_takes_no_more_tokens_than_the_whole() -> None:
    """Else a model might be shown more than it can read."""

    class OneWord(Bytes):
        def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
            return [
                np.array([7], np.uint8) if text == "word\n" else ids
                for text, ids in zip(texts, super().encode(texts), strict=True)
            ]

    tokens, size = Cuts(Form(**FORM), OneWord()).by_bytes(b"word", 3)
    assert (tokens, size) == ([10], 0)


def evaluated(model_0: str, model_1: str) -> Report:
    """Two models' answers; of each, one digit says what is right: from float16, from int4, from
    the text, its first tokens, its first bytes and nothing.
    """
    examples = [Example("cupboardab47 " * 4, "cupboardab", ("47",), bits=64.0)] * 10
    answers = Answers(examples, [Bytes().decode] * 2, "\n")
    right = {
        way: [int(each) for each in digits]
        for way, digits in zip(
            ("float16", "int4", "text", "first", "cut", "nothing"),
            zip(model_0, model_1, strict=True),
            strict=True,
        )
    }
    sizes = {"int8": 72, "float16": 128, "int4": 40, "text": 51, "first": 45, "cut": 40}
    outputs = {"wire": torch.full((10,), WIRES.index("int4"))}
    for way in ANSWER_INPUTS:
        outputs[f"bytes/{way}"] = torch.full((10,), sizes.get(way, 0))
        for number in (0, 1):
            said = [
                b"47\n" if row < right.get(way, [0, 0])[number] else b"12\n" for row in range(10)
            ]
            outputs[f"answer/{way}/{number}"] = torch.tensor([list(each) for each in said])
    answers.add(np.arange(10), {}, Prediction({}, outputs))
    return answers.report(answers.rows())


def test_the_headline_compares_with_the_best_text_of_the_same_size() -> None:
    lines = evaluated("190671", "190210").text.splitlines()
    assert lines[0] == (
        "latents, int4, against the best text of 40 bytes: model 0: 90.0% against 70.0%,"
        " +20.0 points; model 1: 90.0% against 10.0%, +80.0 points"
    )
    sizes = {line[:LABEL].strip(): line[LABEL:].split()[0] for line in lines[3:14]}
    assert sizes["its first bytes, as many as the latents"] == "40"
    assert sizes["what the text really holds, 64 bits"] == "8"
    assert int(sizes["the whole text, compressed with deflate"]) == deflated_size(
        "cupboardab47 " * 4
    )
    worse = evaluated("119951", "119951").text.splitlines()[0]
    assert worse.endswith("model 1: 10.0% against 50.0%, -40.0 points")


def test_arrays_hold_what_models_and_encoder_read() -> None:
    made = examples()
    rows = made.read(np.array([3, 0]))
    text = [bytes(row[row != EMPTY].astype(np.uint8)).decode() for row in rows["context"]]
    assert text == [made.examples[3].context, made.examples[0].context]
    for number in (0, 1):
        shown = [
            "".join(
                bytes(
                    rows[f"{kind}_{number}"][row][rows[f"{kind}_{number}"][row] != EMPTY].astype(
                        np.uint8
                    )
                ).decode()
                for kind in ("context", "question", "answer")
            )
            for row in (0, 1)
        ]
        assert shown == [
            f"{each.context}\n{each.question}{each.answers[0]}\n"
            for each in (made.examples[3], made.examples[0])
        ]
    assert all((array == EMPTY).all() and len(array) == 3 for array in made.padding(3).values())
    with_others = WithOthers(made)
    assert np.array_equal(
        with_others.read(np.array([3]))["other"], made.read(np.array([0]))["context"]
    )
    assert with_others.padding(2).keys() == with_others.read(np.array([0])).keys()


def test_questions_about_one_text_come_together() -> None:
    made = examples()
    for most, sizes in ((1, [1, 1, 1, 1]), (2, [2, 2]), (3, [2, 2])):
        rows = made.together(most)
        assert [len(row) for row in rows] == sizes
        assert sorted(np.concatenate(rows).tolist()) == [0, 1, 2, 3]
        together, alone = (
            made.read_together(rows[::-1], most),
            made.read(np.concatenate(rows[::-1])),
        )
        assert together["question_0"].shape == (len(rows), most, 10)
        for row, some in enumerate(rows[::-1]):
            for place, index in enumerate(some):
                before = made.read(np.array([index]))
                assert np.array_equal(together["context"][row], before["context"][0])
                assert np.array_equal(together["answer_1"][row, place], before["answer_1"][0])
            assert (together["question_0"][row, len(some) :] == EMPTY).all()
        assert alone["answer_0"].shape == (4, 5)


@pytest.mark.parametrize(
    ("context_bytes", "answer_tokens", "seq_len", "message"),
    [
        (24, 5, 99, "data.context_bytes=24: the longest text has 25 bytes; give 25"),
        (25, 2, 99, "data.answer_tokens=2: the longest answer has 3 tokens, its end included; giv"),
        (25, 5, 30, "arch.models[0]=x: reads 30 tokens at once, but the longest text with its qu"),
    ],
)
def test_what_does_not_fit_is_refused(
    context_bytes: int, answer_tokens: int, seq_len: int, message: str
) -> None:
    for skip in (False, True):
        with pytest.raises(ConfigError) as error:
            examples(context_bytes, answer_tokens, skip, seq_len)
        assert str(error.value).startswith(message)
        assert str(error.value).endswith(" of train); data.skip=true leaves none of them")


def test_what_does_not_fit_is_left_out_if_wanted() -> None:
    stories = make_stories(0, 1, 1, 2)["train"] + make_stories(0, 1, 1, 3)["train"]
    with pytest.raises(ConfigError, match=r"add data\.skip=true, which leaves out 3"):
        Examples(stories, Form(**FORM), []).fit(25, 5, skip=False)
    assert len(Examples(stories, Form(**FORM), []).fit(25, 5, skip=True)) == 2


LENGTH: dict[str, Any] = {"seed": 1, "shards": 2, "global_batch_size": 4, "epochs": 2, "form": FORM}


@pytest.mark.parametrize("predict", ["all", "answers"])
def test_a_language_model_reads_texts_with_all_their_questions(predict: str) -> None:
    source = make_source("qa_text", **LENGTH, stories=STORIES, seq_len=90, predict=predict)
    batch = source.train_batch(0, 1)
    assert batch["inputs"].shape == (2, 90)
    for inputs, labels in zip(batch["inputs"], batch["labels"], strict=True):
        assert inputs[0] == 256
        text = bytes(inputs[1 : np.flatnonzero(inputs).max() + 1].astype(np.uint8)).decode()
        story, *asked = (text + "\n").splitlines()
        facts = story.split()
        assert sorted(asked) == sorted(facts)
        counted = labels >= 0
        learned = bytes(labels[counted].astype(np.uint8)).decode()
        assert learned == (
            text + "\n" if predict == "all" else "".join(f"{fact[10:]}\n" for fact in asked)
        )
        places = np.flatnonzero(counted)[:-1]
        assert np.array_equal(labels[places], inputs[places + 1]), "what follows is to be said"
    assert source.spec.decode is not None
    assert source.length.total_steps == 10
    with pytest.raises(
        ConfigError,
        match=(
            r"data.seq_len=70: the longest text has 7\d tokens with its questions \(story 0 of"
            r" train\); give 7\d"
        ),
    ):
        make_source("qa_text", **LENGTH, stories=STORIES, seq_len=70)


def test_texts_grow_from_the_shortest_and_shards_have_one_width() -> None:
    stories = {"train": 40, "test": 4, "facts": 6, "least": 1}
    usual, growing = (
        make_source("qa_text", **LENGTH, stories=stories, seq_len=170, growing_steps=steps)
        for steps in (0, 10)
    )

    def rows_of(source: QAText, step: int) -> np.ndarray:
        return np.concatenate([source.train_batch(step, shard)["inputs"] for shard in range(2)])

    def facts(rows: np.ndarray) -> list[int]:
        # a line end follows the text, and each answer but the last
        return (rows == ord("\n")).sum(1).tolist()

    epoch = sorted(count for step in range(10) for count in facts(rows_of(usual, step)))
    assert (epoch[0], epoch[-1]) == (1, 6)
    for step in range(10):
        rows = rows_of(growing, step)
        assert max(facts(rows)) <= epoch[4 * step + 3]
        longest = (rows > 0).sum(1).max()
        assert rows.shape == (4, min(170, -(-longest // 32) * 32)), "no more padding than needed"
        assert np.array_equal(rows, rows_of(growing, step))
    assert max(facts(rows_of(growing, 9)) + facts(rows_of(growing, 8))) > epoch[0]
    for step in (10, 11):
        rows = rows_of(growing, step)
        assert np.array_equal(rows, rows_of(usual, step)[:, : rows.shape[1]])


def test_tokens_made_of_the_texts_are_the_same_whenever_they_are_made() -> None:
    one, two = (
        make_source("qa_text", **LENGTH, stories=STORIES, tokenizer="bpe:280") for _ in range(2)
    )
    assert one.spec.fingerprint == two.spec.fingerprint
    assert 257 < one.spec.vocab_size <= 280
    text = "cupboardab47 cupboardcd12"
    assert one.tokenizer.decode(one.tokenizer.encode([text])[0]) == text
    assert len(one.tokenizer.encode([text])[0]) < len(text)
    assert (
        make_source("qa_text", **LENGTH, stories=STORIES, tokenizer="bpe:270").spec.fingerprint
        != one.spec.fingerprint
    )
    for wrong in ("bpe:", "bpe:10", "bpe:x"):
        with pytest.raises(
            ConfigError, match=f"data.tokenizer={wrong}: give bpe:SIZE, with 257 tokens or more"
        ):
            make_source("qa_text", **LENGTH, stories=STORIES, tokenizer=wrong)


def test_sizes_are_those_of_the_data_unless_told(reader_folders: list[str]) -> None:
    keys = LENGTH | {"stories": STORIES, "models": reader_folders[:1]}
    source = make_source("qa", **keys, context_bytes=None)
    width = source.train_batch(0, 0)["answer_0"].shape[-1]
    assert source.eval_sets()["test"].read(np.array([0]))["answer_0"].shape[-1] == width
    assert source.spec.name == f"made-up stories, answers of up to {width} tokens"
    assert source.spec.seq_len == len("cupboardab47 cupboardcd12 cupboardef03")
    typed = make_source("qa", **keys, answer_tokens=width + 2)
    assert typed.train_batch(0, 0)["answer_0"].shape[-1] == width + 2
    assert (typed.spec.name, typed.spec.seq_len) == ("made-up stories", 256)
    with pytest.raises(ConfigError, match=f"has {width} tokens, its end included; give {width}, o"):
        make_source("qa", **keys, answer_tokens=width - 1)


@pytest.mark.parametrize(
    ("said", "right", "same", "shared"),
    [
        ("The Norman", ["norman"], 1.0, 1.0),
        ("in the 10th  century!", ["10th century"], 0.0, 0.8),
        ("", ["x"], 0.0, 0.0),
        ("", [""], 1.0, 1.0),
        ("a b c", ["x", "b c d e"], 0.0, 2 * 2 / (2 + 4)),  # an article is no word
        ("47", ["12", "47"], 1.0, 1.0),
    ],
)
def test_answers_are_judged_as_squad_does(
    said: str, right: list[str], same: float, shared: float
) -> None:
    assert exact(said, right) == same
    assert f1(said, right) == pytest.approx(shared)
