"""What `python -m utils.checkpoint` shows, verifies, compares, and exports."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.sparse_embedding import SparseEmbedding
from optim.averages import EMA
from tests.utils.checkpoint.helpers import META, alone, flip, held, together, told
from utils.checkpoint.writer import Writer
from utils.ranks.distributed import Dist


def test_show_lists_every_tensor_and_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    together(tmp_path / "checkpoints", 2, 7)
    first, second, *rest = told(capsys, "show", tmp_path).splitlines()
    assert first == f"{tmp_path}/checkpoints/step_7: step 7, 21 tensors, 5,090 bytes in 4 files"
    assert second == "written by 2 ranks, PyTorch 2"
    columns = {line.split()[0]: line.split(maxsplit=1)[1] for line in rest}
    assert len(columns) == 21
    assert columns["model/weight"].split() == [
        *("F32", "[40,", "30]", "4,800", "model.safetensors")
    ]
    assert columns["shards/3/state/0"].split()[-1] == "shards.safetensors"


def test_verify_tells_whether_every_byte_is_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = alone(tmp_path / "checkpoints", 7)
    whole = told(capsys, "verify", tmp_path)
    assert whole.startswith(f"{folder}: whole, 6 files, ")
    (folder / "kept").mkdir()
    (folder / "notes.txt").write_text("mine")
    beside = "; not checked, as manifest.json does not name them: kept, notes.txt\n"
    assert told(capsys, "verify", tmp_path) == whole.replace("\n", beside)
    flip(folder / "ema.safetensors")
    assert "step_7 is damaged (ema.safetensors: sha256 differs)" in told(
        capsys, "verify", tmp_path, status=2
    )
    alone_in = folder / "ema.safetensors"
    assert f"{alone_in}: a file alone; give a folder" in told(capsys, "verify", alone_in, status=2)


def test_diff_finds_the_same_in_other_files_and_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    alone(one, 7)
    together(two, 3, 7)
    assert told(capsys, "diff", one, two) == "the same: 21 tensors, to the bit\n"
    together(other, 2, 7, 8.5)
    said = told(capsys, "diff", two, other, status=1)
    assert said.startswith("12 of 21 tensors differ\nmodel/")
    assert "model/weight: 1,200 of 1,200 values, by at most 1.5\n" in said
    for value, largest in ((float("nan"), "beyond all numbers"), (-7.0, "14")):
        alone(tmp_path / str(value), 7, value=7.0)
        file = tmp_path / str(value) / "step_7" / "model.safetensors"
        content = file.read_bytes()
        seven = torch.tensor(7.0).numpy().tobytes()
        file.write_bytes(content.replace(seven, torch.tensor(value).numpy().tobytes(), 1))
        said = told(capsys, "diff", one, tmp_path / str(value), status=1)
        assert f"model/weight: 1 of 1,200 values, by at most {largest}\n" in said


def test_names_of_a_strangers_tensors_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a\x1b[2J\nb"
    for value in (0, 1):
        writer = Writer(tmp_path / str(value), Dist(), pytest.fail)
        writer.save(7, held({"model": {evil: torch.tensor([value])}}), {**META, "code": evil})
        writer.close()
    for command in (("show", tmp_path / "0"), ("diff", tmp_path / "0", tmp_path / "1")):
        said = told(capsys, *command, status=int(command[0] == "diff"))
        assert "\x1b" not in said
        assert r"a\x1b[2J\nb" in said


@pytest.mark.parametrize("averages", [False, True])
def test_export_writes_weights_or_their_averages(
    averages: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As evaluations see them: sparse tables are not averaged."""
    net, table = nn.Linear(3, 2), SparseEmbedding(5, 4)
    ema = EMA(dict(net.named_parameters()), 0.5)
    for _ in range(6):
        with torch.no_grad():
            net.weight.add_(1.0)
            table.weights.add_(1.0)
        ema.update()
    model = {**net.state_dict(), "table.weights": table.weights}
    groups = {"model": model, **({"ema": ema.state()} if averages else {})}
    writer = Writer(tmp_path / "run", Dist(), pytest.fail)
    writer.save(6, held(groups), {**META, "config": {"ema_rate": 0.5, "ema_warmup": False}})
    writer.close()
    said = told(capsys, "export", tmp_path / "run", tmp_path / "out")
    kind = "averaged weights" if averages else "weights"
    assert said == f"{tmp_path}/out: {kind} of step 6, 3 tensors, 28 values\n"
    exported = load_file(tmp_path / "out" / "model.safetensors")
    if averages:
        assert not torch.equal(exported["weight"], net.weight)
        with ema.applied():
            assert torch.equal(exported["weight"], net.weight)
    assert torch.equal(exported["table.weights"], table.weights)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["step"] == 6
    assert meta["results"] == META["results"]
    assert meta["config"].get("ema") == (False if averages else None)
    assert f"{tmp_path}/out: whole" in told(capsys, "verify", tmp_path / "out")
    assert "exists" in told(capsys, "export", tmp_path / "run", tmp_path / "out", status=2)


@pytest.mark.parametrize("command", ["show", "import"])
def test_a_damaged_safetensors_file_is_not_taken_for_a_pickle(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "x.safetensors", [tmp_path / "out"] * (command == "import")
    save_file({"a": torch.ones(9)}, file)
    if out:
        said = told(capsys, command, file, *out, status=2)
        assert said == f"{file}: is safetensors already; use it as checkpoint or init_from\n"
    file.write_bytes(file.read_bytes()[:-1])
    said = told(capsys, command, file, *out, status=2)
    assert said.startswith(f"checkpoint={file}: x.safetensors: cannot be read (")
    assert said.endswith("; it may be damaged: copy it again\n")
    assert not (tmp_path / "out").exists()
