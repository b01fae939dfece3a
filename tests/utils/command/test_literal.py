"""Texts on the command line: taken as they are written, escapes as in Python."""

from __future__ import annotations

import pytest

from data.sample import unescaped
from tests.runs import config_of

PROMPTS = [
    ("def né", "def né"),
    (r"def f(x):\n    return", "def f(x):\n    return"),
    ("a line\nand another", "a line\nand another"),
    (r'"def f(x): "', "def f(x): "),
    (r"'it\'s'", "it's"),
    ('it\'s "so", [really] {a: b}', 'it\'s "so", [really] {a: b}'),
    ('"one" and "two"', '"one" and "two"'),
    ("cost ${HOME} $5 ${a.b", "cost ${HOME} $5 ${a.b"),
    (" a=1, b=2 ", " a=1, b=2 "),
    (r"C:\\new", r"C:\new"),
    (r"\d+ \q", r"\d+ \q"),
]


@pytest.mark.parametrize(("written", "meant"), PROMPTS)
def test_a_prompt_is_what_the_user_has_written(written: str, meant: str) -> None:
    config = config_of("experiment=lm", f"data.prompt={written}")
    assert unescaped(config.data.prompt) == meant


def test_what_is_no_text_stays_hydras() -> None:
    assert config_of("experiment=lm", "data.prompt=null").data.prompt is None
    assert config_of("experiment=lm", "data.prompt=word").data.prompt == "word"
    assert config_of("experiment=lm", "project_name='a b'").project_name == "a b"
