"""`python -m utils.prove` finds mistakes that no trial of one batch can see, and says what usually
causes their pattern.

They are made in a copy of the repository, as users make them: in its own files.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_env, run_ranks, started, until
from utils.prove.causes import CAUSES, ONLY_EVALUATION

MINE = Path(__file__).parent
CONF = """
defaults: [digits, _self_]
_target_: data.digits.mistaken.Mistaken
"""
CONF_OPTIM = """
dense:
  - match: ".*"
    optimizer: {_target_: optim.mistaken.Attribute, lr: "${lr}"}
schedule: {_target_: optim.mistaken.Remembers}
"""
CONF_ARCH = """
_target_: models.digits.mistaken.Net
width: 32
loss: {_target_: models.digits.mistaken.Loss}
"""
KEYS = [
    "arch=cnn", "data=mistaken", "optim=mistaken", "global_batch_size=16", "lr=0.1",
    "epochs=null", "eval_interval=null", "max_steps=4", "arch.forward_dtype=float32",
]  # fmt: skip
FORKED = ["-m", "tests.utils.prove.forked"]
EXPECTED = {
    "none": {},
    "set": {"again": CAUSES["again"], "two ranks": ""},
    "time": {"again": CAUSES["again"]},
    "rank": {"two ranks": "", "parts": ""},  # both have two ranks
    "history": {"resumed": CAUSES["resumed"]},
    "process": {"loader": CAUSES["loader"]},
    "evaluation": {"again": ONLY_EVALUATION},
    "attribute": {"resumed": CAUSES["resumed"]},
    "schedule": {"resumed": CAUSES["resumed"]},
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy") / "lockstep"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "wheels", "tests"))
    shutil.copy(MINE / "mistaken_data.py", folder / "data/digits/mistaken.py")
    shutil.copy(MINE / "mistaken_optim.py", folder / "optim/mistaken.py")
    shutil.copy(MINE / "mistaken_loss.py", folder / "models/digits/mistaken.py")
    (folder / "conf/data/mistaken.yaml").write_text(CONF)
    (folder / "conf/arch/mistaken.yaml").write_text(CONF_ARCH)
    (folder / "conf/optim/mistaken.yaml").write_text(CONF_OPTIM)
    return folder


def proof(folder: Path, *keys: str, mistake: str = "") -> subprocess.Popen[str]:
    """The command in a folder, with the code there or else with this repository's."""
    code = folder if (folder / "utils").exists() else ROOT
    env = clean_env(MISTAKE=mistake, PYTHONPATH=str(code))
    return started([sys.executable, "-m", "utils.prove", *keys], folder, env)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("mistake", EXPECTED)
def test_a_mistake_is_found_with_its_usual_cause(mistake: str, copy: Path) -> None:
    # a schedule is asked once more for each checkpoint: after 2 steps, counts would be equal
    keys = [*KEYS, *["max_steps=8"] * (mistake == "schedule")]
    process = proof(copy, *keys, mistake=mistake)
    said, err = process.communicate(timeout=240)
    assert process.returncode == int(mistake != "none"), said + err
    for way, cause in EXPECTED[mistake].items():
        assert f"  {way:10} the same" not in said, said
        assert cause in said, said
    if "again" in EXPECTED[mistake]:
        assert CAUSES["loader"] not in said
        assert said.count(ONLY_EVALUATION) <= 1
    if mistake in ("none", "rank", "attribute", "schedule", "process"):
        others = {"again", "two ranks", "resumed", "loader", "parts"} - EXPECTED[mistake].keys()
        assert all(f"  {way:10} the same" in said for way in others), said
    assert (mistake == "none") == ("One run, to the last bit" in said)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("mistake", ["none", "worst half", "penalty"])
def test_a_loss_that_sees_other_rows_is_found(mistake: str, copy: Path) -> None:
    keys = [key for key in KEYS if not key.startswith(("arch", "data", "optim"))]
    keys += ["arch=mistaken", "data=digits", "optim=adamw", "max_steps=6"]
    process = proof(copy, *keys, mistake=mistake)
    said, err = process.communicate(timeout=240)
    assert process.returncode == int(mistake != "none"), said + err
    for way in ("again", "two ranks", "resumed", "loader"):
        assert f"  {way:10} the same" in said, said
    fine = "  parts      the same but for rounding (two ranks, one shard at a time, float64)"
    assert (fine in said) == (mistake == "none"), said
    assert (CAUSES["parts"] in said) == (mistake != "none")


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (["experiment=demo", "max_steps=1"], "max_steps=1: a run is stopped half way; give 2 or"),
        (["experiment=digits", "lrr=1"], "error: lrr: unknown key; did you mean lr"),
    ],
)
def test_what_cannot_be_proved_is_one_line_and_leaves_no_folder(
    keys: list[str], line: str, tmp_path: Path
) -> None:
    (done,) = run_ranks(1, [*FORKED, *keys], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))


def test_a_proof_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    (done,) = run_ranks(1, [*FORKED, "experiment=digits"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")
    assert until(lambda: not processes_of(int(done.stdout.split()[0])))
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_command_that_is_stopped_leaves_nothing(signum: int, tmp_path: Path) -> None:
    process = proof(tmp_path, "experiment=digits")
    # the second run is under way
    assert until(lambda: bool(list(tmp_path.glob("runs/*/again"))), 200)
    os.kill(process.pid, signum)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "\ninterrupted\n")
    # what its runs had started ends when it sees them gone
    assert until(lambda: not processes_of(process.pid), 60)
    assert not list((tmp_path / "runs").iterdir())


def processes_of(session: int) -> list[str]:
    """The numbers of the processes of a session."""
    found = subprocess.run(["ps", "-s", str(session), "-o", "pid="], capture_output=True, text=True)
    return found.stdout.split()
