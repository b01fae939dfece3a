"""Configurations written before modules moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.runs import TINY_GPT, digest, train
from utils.checkpoint.manifest import MANIFEST, entry_of, text_of
from utils.command.instantiate import find
from utils.command.renamed import MOVED, REPEATED, up_to_date
from utils.files import ROOT


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_stands_for_a_module_that_is_there(old: str) -> None:
    if is_module(MOVED[old]):
        assert not is_module(old)
    else:
        module, name = find("sync", old)
        assert f"{module}.{name}" == MOVED[old]


def is_module(name: str) -> bool:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file()


def test_old_names_are_found_and_others_stay() -> None:
    assert find("arch", "models.gpt.GPT") == ("models.language.gpt", "GPT")
    config = {"_target_": "models.objectives.act.ActObjective", "list": [{"_target_": "x.Y"}]}
    assert up_to_date(config) == {
        "_target_": "models.recursive.act.ActObjective",
        "list": [{"_target_": "x.Y"}],
    }


def test_a_run_saved_before_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    arguments = [*TINY_GPT, "data.max_new_tokens=0"]
    whole = train(tmp_path / "whole", *arguments, "max_steps=4")
    half = train(tmp_path / "half", *arguments, "max_steps=2", "run_name=whole")
    (latest,) = half.directory.glob("checkpoints/step_2")
    values = OmegaConf.load(half.directory / "config.yaml")
    repeated = "".join(f"  {key}: {json.dumps(values.get(key))}\n" for key in sorted(REPEATED))
    for file in (half.directory / "config.yaml", latest / "meta.json"):
        text = file.read_text()
        for old, new in MOVED.items():
            for end in (".", "\n", "\\n"):  # of a module; of a full name in YAML, and in JSON
                text = text.replace(f" {new}{end}", f" {old}{end}")
        assert "_target_: models.gpt.GPT" in text
        assert "_target_: optim.exact.build_reducer" in text
        if file.name == "config.yaml":
            file.write_text(text.replace("\ndata:\n", f"\ndata:\n{repeated}"))
        else:
            saved = json.loads(text)
            saved["config"] = saved["config"].replace("\ndata:\n", f"\ndata:\n{repeated}")
            file.write_text(json.dumps(saved))
    files = json.loads((latest / MANIFEST).read_text())["files"]
    (latest / MANIFEST).write_text(text_of({name: entry_of(latest / name) for name in files}))
    done = train(tmp_path / "half", *arguments, "max_steps=4", "run_name=whole")
    assert digest(done.directory) == digest(whole.directory)


def test_a_key_of_data_that_repeats_the_run_is_dropped_and_another_stays() -> None:
    config = {"seed": 1, "epochs": 2, "data": {"seed": 1, "epochs": 3, "seq_len": 8}}
    assert up_to_date(config)["data"] == {"epochs": 3, "seq_len": 8}
