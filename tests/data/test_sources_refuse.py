"""What sources refuse before a run: one line with the key, its value and what would be right."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.language.token_helpers import write_corpus
from tests.data.recursive.helpers import write_dataset
from tests.making import make_source
from utils.errors import ConfigError

RUN = {"shards": 2, "global_batch_size": 8}
EPOCHS = {"epochs": 6, "eval_interval": 3}
STEPS, NO_BATCH = {"max_steps": 10}, {"global_batch_size": None}
INDUCTION = STEPS | {"vocab_size": 6, "seq_len": 9}
TOKENS, TEXTS = STEPS | {"data_path": "{in}/tokens"}, STEPS | {"data_path": "{in}/texts"}
PUZZLES = EPOCHS | {"data_path": "{in}/a"}
DRAWN = "data_path=x: this data is drawn anew, not read"
WITHOUT_FILES = "describes token files, but data_path"

# the data, its keys, and the line
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("features", STEPS | {"low": 1.0}, "data.low=1: must be less than data.high=1"),
    ("features", STEPS | {"data_path": "x"}, DRAWN),
    ("features", {}, "max_steps=null"),
    ("features", STEPS | NO_BATCH, "global_batch_size=null: say how many examples"),
    ("induction", INDUCTION | {"prefix_window": 7}, "data.prefix_window=7: must be at most 6"),
    ("induction", INDUCTION | {"data_path": "x"}, DRAWN),
    ("digits", EPOCHS | {"data_path": "x"}, "data_path=x: .* reads no folder"),
    ("tokens", TOKENS | {"tokens_per_update": 64}, "global_batch_size=8 and tokens_per_update=64"),
    ("tokens", TOKENS | NO_BATCH | {"tokens_per_update": 600}, "tokens_per_update=600 .*try 512"),
    ("tokens", TOKENS | {"max_tokens": 63, "max_steps": None}, "max_tokens=63"),
    ("tokens", STEPS | {"vocab_size": 256}, f"data.vocab_size=256: {WITHOUT_FILES}"),
    ("tokens", STEPS | {"begin_token": 256}, f"data.begin_token=256: {WITHOUT_FILES}"),
    ("tokens", TOKENS | {"seq_len": 667}, "data.seq_len=667: data_path=.*; try 666 or less"),
    ("tokens", TOKENS | {"documents": True}, "data.documents=true: .*; add data.begin_token=ID"),
    ("tokens", TOKENS | {"prompt": "a"}, "data.prompt=a: .* names no tokenizer"),
    ("stream", TEXTS | {"num_workers": 2}, "num_workers=2: data=stream reads in the training"),
    ("stream", TEXTS | {"epochs": 2}, "epochs=2: this data has no epochs"),
    ("stream", TEXTS | {"max_steps": None, "max_tokens": None}, "max_steps=null: a stream has no"),
    ("stream", TEXTS | {"split": "test"}, "data.split=test: only a dataset on the hub has splits"),
    ("stream", STEPS, "data_path=null and data.hub=null: give one of the two"),
    ("stream", TEXTS | {"data_path": "{in}/none"}, "data_path=.*none: no such file or folder"),
    ("stream", TEXTS | {"data_path": "{in}"}, "data_path=.*: files of several kinds"),
    ("stream", TEXTS | {"field": "body"}, "data_path=.*: line 1: has text, not body; name the"),
    ("stream", TEXTS | {"tokenizer": "no.json"}, ".*=no.json: no.json is not a tokenizer"),
    ("puzzles", PUZZLES | {"global_batch_size": 64}, "global_batch_size=64.*eval_interval=4"),
    ("puzzles", PUZZLES | {"data_paths": ["{in}/b"]}, "data_path=.*both given"),
    ("puzzles", PUZZLES | {"data_paths_test": ["{in}/b"]}, "data_paths_test=.*no test"),
    ("puzzles", EPOCHS | {"embedded": None}, "data_path=null"),
    ("puzzles", PUZZLES | {"evaluators": ["vote"]}, r"evaluators=\[vote\]: unknown"),
    ("puzzles", PUZZLES | {"whole_paths_from": 0.5}, "data.whole_paths_from=0.5: only mazes"),
    ("puzzles", PUZZLES | {"revealed": 0.5}, "data.revealed=0.5: only Sudoku boards"),
    ("puzzles", PUZZLES | {"eval_split": "validation"}, "data_path=.*NAME --validation builds"),
    ("puzzles", EPOCHS | {"eval_split": "validation"}, "data.eval_split=validation: generated"),
    ("puzzles", PUZZLES | {"puzzle": "1."}, "data.puzzle=1.: .* add eval_only=true"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    write_corpus(folder / "tokens")
    for name in "ab":
        write_dataset(folder / name, [[1]] * 20)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "b.txt").write_text("three")
    return folder


@pytest.mark.parametrize(
    ("data", "keys", "line"), REFUSED, ids=[f"{data} {line[:40]}" for data, _, line in REFUSED]
)
def test_what_is_impossible_is_one_line(
    data: str, keys: dict[str, Any], line: str, folder: Path
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(filled, value)]
        return value.replace("{in}", str(folder)) if isinstance(value, str) else value

    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        make_source(data, **RUN | {key: filled(value) for key, value in keys.items()})
    assert str(caught.value).isprintable()
