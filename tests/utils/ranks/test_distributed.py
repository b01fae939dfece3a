"""Real process groups under real launchers, and which device a rank takes."""

from __future__ import annotations

import json
import resource
import shutil
import socket
from pathlib import Path

import pytest
import torch

from tests.ranks import ROOT, check_ended_well, clean_env, free_port, numbered, run_as
from tests.runs import MPIRUN, TORCHRUN, launched
from tests.utils.ranks.ranks_distributed import metrics
from tests.utils.ranks.test_launchers import mvapich2
from utils.errors import ConfigError
from utils.ranks.distributed import Dist, allow_open_files, pick_device
from utils.ranks.launchers import Launch
from utils.revision import code_hashes

NEEDS_MPIRUN = pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun here")


def test_the_limit_of_open_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def run_two(launcher: str, folder: Path) -> None:
    module = ["-m", "tests.utils.ranks.ranks_distributed", str(folder)]
    if launcher == "env":
        check_ended_well(run_as(numbered(2, MASTER_PORT=str(free_port())), module, 60))
        return
    if launcher == "mvapich2":  # its variables alone; ranks find each other by their parent
        envs = [clean_env(**mvapich2(rank, 2, rank, 2)) for rank in range(2)]
        check_ended_well(run_as(envs, module, 60))
        return
    command = [*TORCHRUN, "--nproc-per-node", "2"] if launcher == "torchrun" else MPIRUN
    done = launched([*command, *module])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "launcher",
    [
        "env",
        "mvapich2",
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("openmpi", marks=[pytest.mark.slow, NEEDS_MPIRUN]),
    ],
)
def test_two_ranks(launcher: str, tmp_path: Path) -> None:
    run_two(launcher, tmp_path)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, result in enumerate(results):
        assert result["launch"] == [launcher, rank, 2, rank]
        assert result["sum"] == 3.0
        assert result["sums"] == [2.0, 10.0]
        assert result["all_to_all"] == [
            [4 + 2 * rank],
            [5 + 2 * rank],
            [104 + 2 * rank],
            [105 + 2 * rank],
        ]
        first = [[False, False], [True, False], [False, False]]
        second = [[False, False], [False, False], [True, False]]
        assert result["at main"] == ([] if rank else [first, second])
        assert result["gathered"] == [
            [[0, 2], [4, 6], [8, 10]],
            [[100, 102], [104, 106], [108, 110]],
        ]
        assert result["copied"] == [5.0] * 3
        assert result["broadcast"] == [True] * 4
        assert result["texts"] == ["", "ü"]
        assert result["cache"] == "filled"
        assert result["again"]
    peers, own, all_alike = (
        "PeerError: rank 1: rank 1 cannot",
        "ConfigError: rank 1 cannot",
        "ConfigError: nobody can",
    )
    assert results[0]["agreed"] == [
        "",
        peers,
        "ConfigError: rank 0 cannot",
        "PeerError: rank 1: OSError: rank 1 cannot",
        peers,
        all_alike,
    ]
    assert results[1]["agreed"] == [
        "",
        own,
        "PeerError: rank 0: rank 0 cannot",
        "OSError: rank 1 cannot",
        own,
        all_alike,
    ]
    assert [result["cache_error"] for result in results] == [
        "ConfigError: disk full",
        "PeerError: rank 0: disk full",
    ]
    alone = metrics(Dist())
    for result in results:
        assert result["metrics"] == [pytest.approx(read, abs=1e-12) for read in alone]
    assert alone[0].keys() == {"loss"}
    assert alone[1:] == [{"loss": 1.5}, {}]


START = """
import os, sys
sys.path[0] = os.environ["CODE"]
from utils.command import cli
from utils.ranks import distributed
cli.main(lambda: distributed.start(device="cpu", timeout_s=30))
"""


@pytest.mark.slow
def test_ranks_with_different_code_do_not_start(tmp_path: Path) -> None:
    for name in code_hashes():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # of these one decides something about a run
    for name in ("optim/groups.py", "data/set/notes.py", "tests/ranks.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("another")
    port, quiet = str(free_port()), "FATAL"  # as pretrain.py sets it
    first, second = numbered(2, MASTER_PORT=port, TORCH_CPP_LOG_LEVEL=quiet)
    checkouts = [{**first, "CODE": str(ROOT)}, {**second, "CODE": str(tmp_path)}]
    done = run_as(checkouts, ["-c", START], 60)
    line = (
        f"error: rank 1 (host {socket.gethostname()}) runs other code than rank 0: optim/groups.py"
        " differs; use one checkout on all hosts\n"
    )
    assert [(rank.returncode, rank.stderr) for rank in done] == [(2, line), (2, "")]


def test_devices_are_picked_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick_device("auto", Launch("srun", 9, 16, 1)) == torch.device("cuda", 1)
    assert pick_device("cpu", Launch("srun", 9, 16, 1)) == torch.device("cpu")
    assert pick_device("cuda:3", Launch()) == torch.device("cuda", 3)
    with pytest.raises(ConfigError, match="4 CUDA devices"):
        pick_device("cuda:4", Launch())
    with pytest.raises(ConfigError, match="all 16 ranks on one device"):
        pick_device("cuda:3", Launch("srun", 9, 16, 1))


def test_an_apple_gpu_is_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("mps", Launch()) == torch.device("mps")
    with pytest.raises(ConfigError, match="device=mps: one rank can use it, not 2"):
        pick_device("mps", Launch("torchrun", 0, 2, 0))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="sees no Apple GPU here; use device=cpu"):
        pick_device("mps", Launch())
