"""Checkpoints: known to be whole or refused, never unpickled, and errors of one line."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.utils.checkpoint.helpers import META, SHARDS, alone, declare, groups, shard_state
from utils.checkpoint import manifest, reader
from utils.checkpoint.init_from import initial_weights
from utils.checkpoint.registry import Tensors
from utils.errors import ConfigError

FILES = [
    "ema.safetensors",
    "manifest.json",
    "meta.json",
    "model.safetensors",
    "optimizer.safetensors",
    "shards.0-7.safetensors",
]


def refused(path: Path, call: Callable[..., object] = reader.load) -> str:
    with pytest.raises(ConfigError) as caught:
        call(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"checkpoint={path}: ")
    return text


def read_shards(path: Path) -> object:
    return reader.load_shards(path, range(SHARDS))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    alone(checkpoints, 9)
    folder = alone(checkpoints, 40)
    assert sorted(file.name for file in folder.iterdir()) == FILES
    for place in (folder, checkpoints, tmp_path):
        assert reader.step_folder(place) == folder
        assert reader.read_meta(place)["step"] == 40
    for path in (folder, checkpoints, tmp_path, str(tmp_path)):
        loaded, meta = reader.load(path)
        own = {"step": 40, "groups": ["ema", "model", "optimizer"], "ranks": 1}
        assert meta == {**META, "value": 40.0, **own}
        for name, members in groups(40.0).items():
            assert loaded[name].keys() == members.keys()
            for key, tensor in members.items():
                assert torch.equal(loaded[name][key], tensor)
                assert loaded[name][key].dtype == tensor.dtype
        some = reader.load_shards(path, [5, 2])
        assert list(some) == [5, 2]
        assert torch.equal(some[5]["state/0"], shard_state(5, 40.0)["state/0"])
    assert reader.load(tmp_path, only=["model"])[0].keys() == {"model"}
    assert reader.load(checkpoints / "step_9")[1]["step"] == 9
    assert (checkpoints / "latest").read_text() == "step_40\n"


def test_tensors_lie_in_memory_of_their_own(tmp_path: Path) -> None:
    """Not somewhere in the file: BLAS adds in another order where the alignment differs."""
    folder = tmp_path / "step_1"
    folder.mkdir()
    odd = {f"t{i}": torch.arange(float(size)) for i, size in enumerate((1, 3, 500, 7, 1000))}
    save_file(odd, folder / "model.safetensors")
    save_file(
        {f"0/{name}": tensor for name, tensor in odd.items()}, folder / "shards.0-0.safetensors"
    )
    (folder / "meta.json").write_text('{"groups": ["model"]}')
    for loaded in (reader.load(folder)[0]["model"], reader.load_shards(folder, [0])[0]):
        assert {tensor.data_ptr() % 64 for tensor in loaded.values()} == {0}
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in loaded.values())
        assert all(torch.equal(loaded[name], tensor) for name, tensor in odd.items())


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_and_every_cut_is_found_and_named(name: str, tmp_path: Path) -> None:
    folder, said = alone(tmp_path, 40), []
    alone(tmp_path, 30)
    assert reader.verify(folder) == ""
    file = folder / name
    whole = file.read_bytes()
    size = len(whole)
    broken = {
        f"flip {at}": whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        for at in {0, 9, *range(5, size, 41), size - 1}
    }
    broken |= {f"cut to {length}": whole[:length] for length in (0, 1, size // 2, size - 1)} | {
        "longer": whole + b"\n"
    }
    for how, content in broken.items():
        file.write_bytes(content)
        problem = reader.verify(folder)
        assert problem.startswith(f"{name}: "), how
        assert "\n" not in problem
        if name != "manifest.json":
            assert problem == f"{name}: " + (
                "sha256 differs" if len(content) == size else f"{len(content)} of {size} bytes"
            )
    assert f"step_40 is damaged ({problem})" in refused(folder, reader.digest)
    assert problem in refused(folder, read_shards if name.startswith("shards") else reader.load)
    assert reader.newest_whole(tmp_path, said.append) == tmp_path / "step_30"
    assert said == [f"checkpoint step_40 is damaged ({problem}); going back to the one before"]
    file.unlink()
    assert reader.verify(folder) == f"{name}: missing"
    file.write_bytes(whole)
    assert reader.newest_whole(tmp_path, said.append) == folder
    assert len(said) == 1


def test_the_order_of_going_back(tmp_path: Path) -> None:
    said: list[str] = []
    assert reader.newest_whole(tmp_path / "nothing", said.append) is None
    for step in (9, 10, 100, 20):
        alone(tmp_path, step)
    for leftover in (".step_200.writing-abc-1", ".step_300.deleted", "step_x", "other"):
        (tmp_path / leftover).mkdir()
    (tmp_path / "step_400").write_text("a file")
    for step, before in ((100, 20), (20, 10), (10, 9)):
        folder = tmp_path / f"step_{step}"
        assert reader.newest_whole(tmp_path, pytest.fail) == folder
        (folder / "meta.json").unlink()
        assert reader.newest_whole(tmp_path, said.append) == tmp_path / f"step_{before}"
        assert (
            said.pop()
            == f"checkpoint step_{step} is damaged (meta.json: missing); going back to the one"
            " before"
        )
        folder.rename(tmp_path / f"gone_{step}")
    (tmp_path / "step_9" / "meta.json").unlink()
    (tmp_path / "gone_10").rename(tmp_path / ".step_10.replaced")
    assert reader.newest_whole(tmp_path, said.append) is None
    assert said == [
        "checkpoint step_10 is damaged (meta.json: missing); going back to the one before",
        "checkpoint step_9 is damaged (meta.json: missing); there is none before it",
    ]


def test_a_manifest_is_not_trusted_further_than_its_folder(tmp_path: Path) -> None:
    folder = alone(tmp_path / "run", 1)
    (tmp_path / "outside").write_text("secret")
    listed, good = (
        folder / "manifest.json",
        json.loads((folder / "manifest.json").read_text())["files"],
    )
    entry = manifest.entry_of(tmp_path / "outside")
    for name in ("../../outside", str(tmp_path / "outside"), "..", "a\0b"):
        listed.write_text(manifest.text_of({**good, name: entry}))
        assert (
            reader.verify(folder)
            == f"manifest.json: cannot be read (names {name!r}, which is no file of this folder)"
        )
    listed.write_text(json.dumps({"files": good, "sha256": "0" * 64}, indent=1) + "\n")
    assert reader.verify(folder) == "manifest.json: cannot be read (its own sha256 differs)"
    for content in (
        "",
        "[]",
        "{}",
        "null",
        '{"files": [], "sha256": ""}',
        '{"files": {"a": 1}}',
        "[" * 100_000,
        "\xff",
    ):
        listed.write_bytes(content.encode("latin-1"))
        assert reader.verify(folder).startswith("manifest.json: cannot be read"), content[:20]
        assert "manifest.json" in refused(folder)
    listed.write_text(manifest.text_of(good))
    (folder / "notes.txt").write_text("a user's")
    assert reader.verify(folder) == ""
    (folder / "more.safetensors").write_bytes(b"")
    assert reader.verify(folder) == "more.safetensors: unknown to manifest.json"
    (folder / "more.safetensors").rename(folder / ".nfs0001")
    assert reader.verify(folder) == ""
    assert reader.verify(tmp_path / "nothing") == "manifest.json: missing"


def test_a_folder_without_a_manifest_is_loaded_but_not_vouched_for(tmp_path: Path) -> None:
    folder = alone(tmp_path, 3)
    (folder / "manifest.json").unlink()
    assert reader.load(tmp_path)[1]["step"] == 3
    assert "manifest.json: missing" in refused(tmp_path, reader.digest)
    weights, meta = folder / "model.safetensors", folder / "meta.json"
    whole = weights.read_bytes()
    for broken in (whole[:-5], whole[:20], b"", b"\xff" * 100):
        weights.write_bytes(broken)
        assert "model.safetensors is damaged or cut short" in refused(tmp_path)
    weights.unlink()
    assert "model.safetensors is damaged" in refused(tmp_path)
    for broken_text in (
        "{",
        "[]",
        "{}",
        '{"groups": ["../x"]}',
        '{"groups": "model"}',
        "[" * 100_000,
    ):
        meta.write_text(broken_text)
        assert "meta.json" in refused(folder)
    (tmp_path / "latest").write_text("../elsewhere")
    assert "does not name a step" in refused(tmp_path)
    (tmp_path / "latest").write_text("step_4")
    assert "names step_4, which is not there" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "holds no meta.json" in refused(tmp_path / "empty")


def test_what_is_only_opened_is_not_hashed(tmp_path: Path) -> None:
    """All bytes that are read are compared with the manifest."""
    folder = alone(tmp_path, 3)
    for name in ("model.safetensors", "shards.0-7.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "model.safetensors: sha256 differs" in refused(folder)
    assert "shards.0-7.safetensors: sha256 differs" in refused(folder, read_shards)
    checkpoint = reader.open_checkpoint(folder, shards=[7])
    assert checkpoint.groups.keys() == {"model", "ema", "optimizer"}
    assert checkpoint.shards.keys() == {7}
    (folder / "ema.safetensors").write_bytes(b"")
    assert "ema.safetensors: 0 of " in refused(folder, reader.open_checkpoint)


def test_a_shard_that_nobody_saved(tmp_path: Path) -> None:
    alone(tmp_path, 3)
    assert "step_3 holds no state of shard 8" in refused(
        tmp_path, lambda path: reader.load_shards(path, [7, 8])
    )


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_any_file_is_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = alone(tmp_path / "run", 1)
    zipped = tmp_path / "zipped.pt"
    torch.save({"a": Bomb()}, zipped)
    for content in (pickle.dumps(Bomb()), pickle.dumps(Bomb(), protocol=0), zipped.read_bytes()):
        (folder / name).write_bytes(content)
        if name != "manifest.json":
            declare(folder)
            assert manifest.damage(folder) == ""  # the manifest lies well
        said: list[str] = []
        for call in (reader.load, read_shards, reader.digest):
            with contextlib.suppress(ConfigError):
                call(folder)
        reader.newest_whole(tmp_path / "run", said.append)
        if name.endswith("safetensors"):
            assert name in refused(folder, reader.digest)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "exploded").exists(), "the bomb must be a real one"


def test_bare_pickles_are_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Bomb()}, tmp_path / "step_52080")
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.safetensors").write_bytes(pickle.dumps(Bomb()))
    for name in ("step_52080", "old.pt", "raw.safetensors"):
        text = refused(tmp_path / name)
        assert f"{name} is a pickle" in text
        assert "python -m utils.checkpoint import" in text
    assert not (tmp_path / "exploded").exists()


def test_a_bare_converted_file_loses_the_compilers_prefix(tmp_path: Path) -> None:
    save_file(
        {"_orig_mod.model.a": torch.ones(2), "model.b._orig_mod.c": torch.ones(1)},
        tmp_path / "hrm.safetensors",
    )
    loaded, meta = reader.load(tmp_path / "hrm.safetensors", ["weights", "more"])
    assert loaded.keys() == {"weights"}, "the first of what is asked for"
    assert set(loaded["weights"]) == {"model.a", "model.b._orig_mod.c"}
    assert meta == {}


def test_weights_to_begin_with_must_fit(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    own = SimpleNamespace(saved=net.state_dict, tables=list, published=lambda path: None)
    good = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    path = str(tmp_path / "x.safetensors")

    def taken(tensors: dict[str, torch.Tensor]) -> Tensors:
        save_file(tensors, path)
        return initial_weights(path, "model", own, pytest.fail)

    assert torch.equal(taken(good)["weight"], torch.ones(2, 3))
    assert taken({**good, "bias": torch.zeros(2).half()}).keys() == good.keys()
    cases = [
        ({"weight": good["weight"]}, f"init_from={path}: bias is missing from it"),
        ({**good, "extra": torch.ones(1)}, f"init_from={path}: it holds extra"),
        (
            {**good, "weight": torch.zeros(2, 4)},
            rf"init_from={path}: weight has shape \(2, 4\) there and \(2, 3\) here",
        ),
        (
            {**good, "bias": torch.zeros(2).int()},
            f"init_from={path}: bias is of torch.int32 there and of torch.float32 here",
        ),
    ]
    for tensors, message in cases:
        with pytest.raises(ConfigError, match=message):
            taken(tensors)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("lr: ${oc.decode:'{a'}", "${oc.decode:'{a'} is an interpolation, and a run writes values"),
        ("lr: ${oc.create:[1]}\nshards: 8", "${oc.create:[1]} is an interpolation"),
        ("arch: {'${x}': 1}", "${x} is an interpolation"),
        ("arch: {_target_: os.system}", "arch._target_=os.system: only things of this repository"),
        (
            "arch: {loss: {_target_: models.no.Such}}",
            "arch.loss._target_=models.no.Such: not found",
        ),
        (
            "data: {data_path: {_target_: data.build.arc.main}}",
            "data.data_path._target_=data.build.arc.main: nothing is made here",
        ),
    ],
)
def test_a_configuration_that_no_run_has_written(config: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(json.dumps({"groups": [], "config": config}))
    with pytest.raises(ConfigError) as caught:
        reader.config_in(str(tmp_path))
    assert str(caught.value).startswith(f"checkpoint={tmp_path}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
