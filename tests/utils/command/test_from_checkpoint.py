"""An evaluation takes over the configuration of what it evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests.runs import config_of
from utils.command.from_checkpoint import as_override, overrides_in_checkpoint
from utils.command.keys import all_rules, kept_by_machine, run_values
from utils.errors import ConfigError

ASKED = ["eval_only=true", "checkpoint=runs/x"]


def plain(config: Any) -> dict[str, Any]:
    made: Any = OmegaConf.to_container(config)
    assert isinstance(made, dict)
    return made


def what_it_is(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that say what run it is; its length is not asked for, nor what `auto` may
    become.
    """
    values, machine = run_values(config, all_rules()), kept_by_machine()
    return {path: value for path, value in values.items() if path.partition(".")[0] not in machine}


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment=demo"],
        [
            "experiment=demo",
            "optim=muon",
            "muon_lr=0.5",
            "seed=3",
            "arch.puzzle_emb_ndim=7",
            "evaluators=[vote]",
            "arch.chains=3",
        ],
        [
            "arch=trm",
            "data_paths=[a,b/c]",
            "evaluators=[{name:arc@ARC}]",
            "data.arc_pool=3",
            "arch.forward_dtype=float64",
            "ema=true",
        ],
        ["arch=hrm", "data_path='it\\'s \"here\", [a]=b: c'", "run_name=mine", "project_name=ours"],
        ["experiment=digits", "arch.dropout=[0.1,0.3]"],
        [
            "experiment=lm",
            "data.prompt='x = \\'\\\\\\''",
            "tokens_per_update=8192",
            "data.mix={a: 0.7, b: 0.3}",
        ],
        ["experiment=shakespeare", "data_path=x"],
        ["experiment=tms_5_2", r"arch.C={'.*(1|[3-4])\(?':9, '.*, ':5, '.*':7}"],
        ["arch=gpt", "data=stream", "optim=adamw_matrices", "data_path=x.txt", "max_steps=5"],
    ],
)
def test_it_is_the_configuration_that_was_trained(arguments: list[str]) -> None:
    trained = plain(config_of(*arguments))
    overrides = overrides_in_checkpoint(ASKED, lambda path: trained if path == "runs/x" else {})
    again = plain(config_of(*overrides, *ASKED))
    assert what_it_is(again) == what_it_is(trained)
    assert (again["run_name"], again["project_name"]) == (
        f"{trained['run_name']}-evaluation",
        trained["project_name"],
    )
    assert len(overrides) < 40, "what is as conf/ has it need not be said"


def test_the_machine_is_not_taken_over_and_what_the_user_says_comes_last() -> None:
    trained = plain(
        config_of(
            "experiment=demo",
            "timeout_s=7",
            "num_workers=3",
            "keep=9",
            "checkpoint_path=elsewhere/y",
            "sync=ddp",
        )
    )
    overrides = overrides_in_checkpoint([*ASKED, "seed=8"], lambda path: trained)
    again = plain(config_of(*overrides, *ASKED, "seed=8", "sync=fsdp"))
    fresh = plain(config_of())
    assert [again[key] for key in ("timeout_s", "num_workers", "keep")] == [
        fresh[key] for key in ("timeout_s", "num_workers", "keep")
    ]
    assert again["checkpoint_path"] == "runs/demo/demo-evaluation"
    assert again["seed"] == 8
    assert "fsdp" in again["sync"]["_target_"]


@pytest.mark.parametrize(
    "given",
    [
        ["checkpoint=x"],
        ["eval_only=false", "checkpoint=x"],
        ["eval_only=true"],
        [*ASKED, "experiment=demo"],
        [*ASKED, "+arch=trm"],
        [*ASKED, "data=tokens"],
        ["eval_only=true", "checkpoint=${data_path}"],
        ["eval_only=true", "checkpoint=a,b"],
    ],
)
def test_whoever_says_what_is_evaluated_is_taken_at_their_word(given: list[str]) -> None:
    assert overrides_in_checkpoint(given, lambda path: pytest.fail("nothing need be read")) == []


@pytest.mark.parametrize("config", [{"arch": {"_target_": "mine.Net"}}, {"arch": 3}, {"x": []}])
def test_what_conf_does_not_have_is_said(config: Mapping[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="checkpoint=runs/x: arch of its run is none that conf/ offers"
    ):
        overrides_in_checkpoint(ASKED, lambda path: config)
    without_data = {"arch": {"_target_": "models.recursive.trm.TRM"}, "data": []}
    with pytest.raises(
        ConfigError, match="checkpoint=runs/x: data of its run is none that conf/ offers"
    ):
        overrides_in_checkpoint(ASKED, lambda path: without_data)
    assert overrides_in_checkpoint(ASKED, lambda path: {}) == [], "bare weights say nothing"


@pytest.mark.parametrize("typed", ["'runs/a b'", "runs/a\\ b", '"runs/a b"'])
def test_the_checkpoint_is_what_hydra_reads_there(typed: str) -> None:
    asked: list[str] = []
    overrides_in_checkpoint(
        ["eval_only=true", f"+checkpoint={typed}"], lambda path: asked.append(path) or {}
    )  # type: ignore[func-returns-value]
    assert asked == ["runs/a b"]


def test_a_run_without_a_way_to_synchronise_is_adopted_all_the_same() -> None:
    trained = plain(config_of("experiment=demo"))
    del trained["sync"]
    assert "arch=trm" in overrides_in_checkpoint(ASKED, lambda path: trained)


@pytest.mark.parametrize("key", ["a^b", "2023", "true", "é"])
def test_keys_that_no_argument_can_hold_are_said(key: str) -> None:
    trained = plain(config_of("experiment=lm"))
    trained["data"]["mix"] = {key: 1.0}
    with pytest.raises(
        ConfigError,
        match=r"^checkpoint=runs/x: data.mix has the key .*, which no argument can hold",
    ):
        overrides_in_checkpoint(ASKED, lambda path: trained)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1e-05,
        "",
        "a b",
        "it's",
        'say "so"',
        "\\",
        "\\'",
        "x\\",
        "[a]",
        "null",
        "3",
        {"a": ["b", 1]},
        [],
    ],
)
def test_values_are_written_so_that_hydra_reads_the_same(value: Any) -> None:
    (read,) = OverridesParser.create().parse_overrides([f"key={as_override(value)}"])
    assert read.value() == value
