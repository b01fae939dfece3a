"""One sha256 over a checkpoint: the same for any number of ranks, another for any other tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.ranks import ROOT, check_ended_well, run_code, run_module
from tests.utils.checkpoint.helpers import SHARDS, alone, declare, shard_state
from utils.checkpoint import reader
from utils.ranks.distributed import Dist


@pytest.mark.slow
def test_the_same_checkpoint_from_any_number_of_ranks(tmp_path: Path) -> None:
    """Saved by 1 and by 3 ranks (3+3+2 shards), read by 1, 2, 4 and 8."""
    digests = set()
    for saved_by, pieces in ((1, ["0-7"]), (3, ["0-2", "3-5", "6-7"])):
        folder = tmp_path / str(saved_by)
        check_ended_well(
            run_module(saved_by, "tests.utils.checkpoint.ranks_writer", "save_once", str(folder))
        )
        files = sorted((folder / "checkpoints" / "step_7").glob("shards.*"))
        assert [file.name for file in files] == [f"shards.{piece}.safetensors" for piece in pieces]
        assert reader.verify(folder / "checkpoints" / "step_7") == ""
        for world_size in (1, 2, 4, 8):
            for rank in range(world_size):
                mine = Dist(rank, world_size).owned_shards(SHARDS)
                loaded = reader.load_shards(folder, mine)
                assert list(loaded) == list(mine)
                for shard in mine:
                    expected = shard_state(shard, 7.0)
                    assert loaded[shard].keys() == expected.keys()
                    assert all(
                        torch.equal(loaded[shard][name], expected[name]) for name in expected
                    )
        digests.add(reader.digest(folder))
    (folder / "checkpoints" / "step_7" / "shards.6-7.safetensors").write_bytes(b"")
    # only the pieces that are needed are touched
    assert reader.load_shards(folder, [5]).keys() == {5}
    assert len(digests) == 1
    assert digests == {reader.digest(alone(tmp_path / "alone", 7))}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "utils.checkpoint", *arguments]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_digest_tells_every_tensor(tmp_path: Path) -> None:
    """Other names, types, shapes, values or shards make another digest; other meta does not."""
    folder = alone(tmp_path, 1)
    first = reader.digest(tmp_path)
    content = {file.name: file.read_bytes() for file in folder.iterdir()}
    base = {"a": torch.zeros(4), "b": torch.ones(2)}
    for name in ("model", "shards.0-7"):
        prefixes = [f"{shard}/" for shard in range(SHARDS)] if name.startswith("shards") else [""]
        seen = {first}
        for tensors in (
            base,
            {**base, "b": torch.ones(2) + 1e-7},
            {"a": base["a"], "c": base["b"]},
            {**base, "a": torch.zeros(2, 2)},
            {**base, "a": torch.zeros(4, dtype=torch.int32)},
            {"a": base["a"]},
        ):
            save_file(
                {
                    f"{prefix}{key}": tensor.clone()
                    for prefix in prefixes
                    for key, tensor in tensors.items()
                },
                folder / f"{name}.safetensors",
            )
            declare(folder)
            seen.add(reader.digest(folder))
        assert len(seen) == 7
        for file, whole in content.items():
            (folder / file).write_bytes(whole)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "threads": 7, "code": "other"}))
    declare(folder)
    assert reader.digest(tmp_path) == first


def test_the_command_prints_one_digest_or_one_line(tmp_path: Path) -> None:
    folder = alone(tmp_path / "checkpoints", 1)
    done = command("digest", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, reader.digest(folder) + "\n", "")
    (folder / "ema.safetensors").write_bytes(b"")
    for arguments, message in (
        (
            ("digest", str(tmp_path)),
            f"checkpoint={tmp_path}: step_1 is damaged (ema.safetensors: 0 of ",
        ),
        (
            ("digest", str(tmp_path / "nothing")),
            f"checkpoint={tmp_path}/nothing: no such file or folder",
        ),
        (("digest", str(folder / "ema.safetensors")), "checkpoint="),
        (("digest",), "usage: python -m utils.checkpoint digest|show|verify PATH"),
        ((), "usage: "),
        (("digset", "x"), "usage: "),
        (("digest", "x", "y"), "usage: "),
    ):
        done = command(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), arguments
        assert done.stderr.startswith(message), done.stderr


def test_the_digest_needs_no_torch(tmp_path: Path) -> None:
    alone(tmp_path, 1)
    code = (
        f"import sys; from utils.checkpoint import reader; reader.digest({str(tmp_path)!r});"
        " print('torch' in sys.modules)"
    )
    done = run_code(code, check=True)
    assert done.stdout == "False\n"
