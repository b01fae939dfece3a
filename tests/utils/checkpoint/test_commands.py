"""What `python -m utils.checkpoint` tells about checkpoints, and what it exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.sparse_embedding import SparseEmbedding
from optim.ema import EMA
from tests.utils.checkpoint.helpers import META, alone, together
from utils.checkpoint import tools
from utils.checkpoint.__main__ import main
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist


def told(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main([*map(str, arguments)]) == status
    out, err = capsys.readouterr()
    assert bool(err) == (status == 2)
    assert err.count("\n") <= 1
    return out + err


def test_show_tells_every_tensor_and_who_wrote_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert together(tmp_path / "checkpoints", 2, 7) == ["", ""]
    first, second, *rows = told(capsys, "show", tmp_path).splitlines()
    assert first.startswith(f"{tmp_path}/checkpoints/step_7: step 7, 21 tensors, 5,090 bytes in ")
    assert second == "written by 2 ranks, PyTorch 2"
    names = [row.split()[0] for row in rows]
    assert names == sorted(names)
    assert len(names) == 21
    (weight,) = [row for row in rows if row.startswith("model/weight ")]
    assert "F32   [40, 30]  4,800  model.0.safetensors, model.1.safetensors" in weight


def test_verify_says_that_all_is_whole_or_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = alone(tmp_path / "checkpoints", 7)
    said = told(capsys, "verify", tmp_path)
    assert said.startswith(f"{folder}: whole, 6 files, ")
    (folder / "ema.safetensors").write_bytes(b"")
    assert f"checkpoint={tmp_path}: step_7 is damaged (ema.safetensors: 0 of " in told(
        capsys, "verify", tmp_path, status=2
    )


def test_diff_finds_the_same_in_other_files_and_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone(tmp_path / "one", 7)
    together(tmp_path / "two", 3, 7)
    said = told(capsys, "diff", tmp_path / "one", tmp_path / "two")
    assert said == "the same: 21 tensors, to the bit\n"
    together(tmp_path / "other", 2, 7, 8.5)
    said = told(capsys, "diff", tmp_path / "two", tmp_path / "other", status=1)
    assert said.startswith("12 of 21 tensors differ\nmodel/")
    assert "model/weight: 1,200 of 1,200 values, by at most 1.5\n" in said
    weights = tmp_path / "one" / "step_7" / "model.safetensors"
    assert "a file of weights alone" in told(capsys, "diff", weights, weights, status=2)
    weights.unlink()
    assert "model.safetensors: missing" in told(
        capsys, "diff", tmp_path / "one", tmp_path / "two", status=2
    )


def test_a_file_that_cannot_be_read_is_not_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [alone(tmp_path / name, 7) for name in ("one", "two")]
    file = folders[1] / "shards.0-7.safetensors"
    content = bytearray(file.read_bytes())
    content[8:9] = b"?"  # where the header begins
    file.write_bytes(content)
    said = told(capsys, "diff", *folders, status=2)
    assert str(file) in said
    for file in folders[1].glob("*.safetensors"):
        file.unlink()
    compared = tools.compare(*folders)
    assert (compared["same"], compared["count"]) == (False, 0)
    assert str(folders[1]) in compared["unreadable"]


def test_names_of_a_strangers_tensors_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a\x1b[2J\nb"
    folders = [tmp_path / name / "step_7" for name in ("one", "two")]
    for value, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(
            json.dumps({"step": 7, "groups": ["model"], "code": evil})
        )
        save_file({evil: torch.tensor([value])}, folder / "model.safetensors")
    for command in (("show", folders[0]), ("diff", *folders)):
        said = told(capsys, *command, status=int(command[0] == "diff"))
        assert "\x1b" not in said
        assert r"a\x1b[2J\nb" in said


def test_export_writes_weights_or_their_averages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As evaluations see them: rows of tables have their averages brought up to date."""
    torch.manual_seed(0)
    net, table = nn.Linear(3, 2), SparseEmbedding(5, 4)
    ema = EMA(dict(net.named_parameters()), {"table": table}, 0.5)
    for step in range(6):
        with torch.no_grad():
            net.weight.add_(1.0)
            ids = torch.tensor([step % 3])
            ema.before_rows_change("table", table.weights, ids, torch.tensor([True]))
            table.weights[ids] += step + 1
        ema.update()
    model = {**net.state_dict(), "table.weights": table.weights}
    writer = Writer(tmp_path / "run", Dist(), pytest.fail)
    meta = {**META, "config": "shards: 1\nema_rate: 0.5\n"}
    writer.save(6, {"model": model, "ema": ema.state()}, {0: {}}, meta)
    assert writer.wait() == ""
    writer.close()
    said = told(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert said == f"{tmp_path}/out: averaged weights of step 6, 3 tensors, 28 values\n"
    exported = load_file(tmp_path / "out" / "model.safetensors")
    weight = net.weight.detach().clone()
    with ema.applied():
        assert torch.equal(exported["weight"], net.weight)
        torch.testing.assert_close(exported["table.weights"], table.weights)
    assert not torch.equal(exported["weight"], weight)
    assert json.loads((tmp_path / "out" / "origin.json").read_text())["step"] == 6
    assert "exists; give a folder that does not" in told(
        capsys, "export", tmp_path / "run", tmp_path / "out", status=2
    )
    assert (tmp_path / "run" / "step_6" / "model.safetensors").exists()


def test_export_of_a_run_without_averages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer(tmp_path / "run", Dist(), pytest.fail)
    writer.save(6, {"model": {"a": torch.ones(2)}}, {0: {}}, {**META, "config": "shards: 1"})
    writer.close()
    said = told(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert said == f"{tmp_path}/out: weights of step 6, 1 tensors, 2 values\n"
