"""Checkpoints: whole or absent, never unpickled, and errors of one line."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from utils import checkpoint
from utils.errors import ConfigError


def group(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), value), "count": torch.tensor(7), "half": torch.tensor([value], dtype=torch.bfloat16)}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    folder = checkpoint.save(checkpoints, 40, {"model": group(1.0), "ema": group(2.0)}, {"fingerprint": "abc", "step": "not this"})
    assert folder == checkpoints / "step_40"
    assert sorted(file.name for file in folder.iterdir()) == ["ema.safetensors", "meta.json", "model.safetensors"]
    for path in (folder, checkpoints, tmp_path, str(tmp_path)):
        groups, meta = checkpoint.load(path)
        assert meta == {"fingerprint": "abc", "step": 40, "groups": ["ema", "model"]}
        for name, value in (("model", 1.0), ("ema", 2.0)):
            assert groups[name].keys() == group(value).keys()
            for key, tensor in group(value).items():
                assert torch.equal(groups[name][key], tensor)
                assert groups[name][key].dtype == tensor.dtype


def test_one_group_is_the_models_and_the_latest_is_found(tmp_path: Path) -> None:
    for step in (9, 10):
        checkpoint.save(tmp_path, step, group(float(step)), {})
    assert (tmp_path / "latest").read_text() == "step_10\n"
    assert checkpoint.load(tmp_path)[0]["model"]["weight"][0, 0] == 10
    assert checkpoint.load(tmp_path / "step_9")[1]["step"] == 9
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_10", "step_9"]


def test_shared_and_strided_memory(tmp_path: Path) -> None:
    bucket = torch.arange(12.0)
    tied = nn.Parameter(torch.ones(3))
    tensors = {"a": bucket[:6].view(2, 3), "b": bucket[6:], "t": bucket.view(3, 4).t(), "one": tied, "two": tied, "none": torch.empty(0)}
    checkpoint.save(tmp_path, 1, tensors, {})
    loaded = checkpoint.load(tmp_path)[0]["model"]
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor), key
    assert (tmp_path / "step_1" / "model.safetensors").stat().st_size < 1000  # a view brings only itself


class Crash(Exception):
    """The power goes."""


def crash_points() -> list[tuple[str, int]]:
    """Every change of the file system that a save makes, before which the process may die."""
    counts = {"Path.mkdir": 2, "Path.rename": 2, "os.replace": 1, "os.fsync": 7, "shutil.rmtree": 3}
    return [(name, at) for name, count in counts.items() for at in range(count)]


@pytest.mark.parametrize(("name", "at"), crash_points())
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(name: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves step 5 again over itself; whatever `latest` names is then the old or the new one, all of it."""
    checkpoint.save(tmp_path, 5, {"model": group(1.0), "ema": group(1.0)}, {"try": 1})
    owner = {"Path": Path, "os": os, "shutil": checkpoint.shutil}[name.split(".")[0]]
    attribute = name.split(".")[1]
    real, calls = getattr(owner, attribute), iter(range(100))

    def dying(*args, **kwargs):
        if next(calls) == at:
            raise Crash
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, dying)
        with pytest.raises(Crash):
            checkpoint.save(tmp_path, 5, {"model": group(2.0), "ema": group(2.0)}, {"try": 2})
    for path in (tmp_path, tmp_path / "step_5"):
        groups, meta = checkpoint.load(path)
        assert {groups[g]["weight"][0, 0].item() for g in ("model", "ema")} == {float(meta["try"])}
    checkpoint.save(tmp_path, 6, group(3.0), {})  # and the next save is not disturbed by what lies about
    assert checkpoint.load(tmp_path)[1]["step"] == 6
    checkpoint.save(tmp_path, 5, group(4.0), {})
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_5", "step_6"]


def test_a_crash_before_latest_keeps_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, group(1.0), {})

    def dying(*_):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(Crash):
            checkpoint.save(tmp_path, 2, group(2.0), {})
    assert checkpoint.load(tmp_path)[1]["step"] == 1


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        checkpoint.load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"checkpoint={path}: ")
    return text


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 3, group(1.0), {})
    weights, meta = folder / "model.safetensors", folder / "meta.json"
    whole = weights.read_bytes()
    for broken in (whole[:-5], whole[:20], b"", b"\xff" * 100):
        weights.write_bytes(broken)
        assert "model.safetensors is damaged or cut short" in refused(tmp_path)
    weights.unlink()
    assert "model.safetensors is damaged" in refused(tmp_path)
    for broken_text in ("{", "[]", "{}", '{"groups": ["../x"]}', '{"groups": "model"}'):
        meta.write_text(broken_text)
        assert "meta.json" in refused(folder)
    (tmp_path / "latest").write_text("../elsewhere")
    assert "does not name a step" in refused(tmp_path)
    (tmp_path / "latest").write_text("step_4")
    assert "names step_4, which is not there" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "holds no meta.json" in refused(tmp_path / "empty")


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_pickles_are_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Bomb()}, tmp_path / "step_52080")
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.safetensors").write_bytes(pickle.dumps(Bomb()))
    for name in ("step_52080", "old.pt", "raw.safetensors"):
        text = refused(tmp_path / name)
        assert f"{name} is a pickle" in text
        assert "weights_only=True" in text
        assert "save_file" in text
    assert not (tmp_path / "exploded").exists()


def test_a_bare_converted_file_loses_the_compilers_prefix(tmp_path: Path) -> None:
    save_file({"_orig_mod.model.a": torch.ones(2), "model.b._orig_mod.c": torch.ones(1)}, tmp_path / "hrm.safetensors")
    groups, meta = checkpoint.load(tmp_path / "hrm.safetensors")
    assert set(groups["model"]) == {"model.a", "model.b._orig_mod.c"}
    assert meta == {}


def test_load_into_is_strict(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    good = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    checkpoint.load_into(module, good, "runs/x")
    assert torch.equal(module.weight, torch.ones(2, 3))
    cases = [
        ({"weight": good["weight"]}, "checkpoint=runs/x: bias is missing from it"),
        ({**good, "extra": torch.ones(1)}, "checkpoint=runs/x: it holds extra"),
        ({**good, "weight": torch.zeros(2, 4)}, r"checkpoint=runs/x: weight has shape \(2, 4\) there and \(2, 3\) here"),
    ]
    for tensors, message in cases:
        with pytest.raises(ConfigError, match=message):
            checkpoint.load_into(module, tensors, "runs/x")
    assert torch.equal(module.weight, torch.ones(2, 3))


def test_meta_is_readable_json(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 3, group(1.0), {"config": "a: é\n"})
    assert json.loads((folder / "meta.json").read_text())["config"] == "a: é\n"
