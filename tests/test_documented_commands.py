"""Every command in a *.md file or at the head of a recipe is parsed by what it calls, or is covered
by a test named here.
"""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.documented import Command, anchors, commands, files, links
from tests.ranks import ROOT
from utils.command import cli, config, keys
from utils.command.arguments import CHOICES, prepare
from utils.errors import ConfigError
from utils.ranks.launchers import Launch

# What a command evaluates, by the folder that it names: the arguments of the run that lies there.
EVALUATED = {"runs/demo/demo": ["experiment=demo"], "runs/lm/lm": ["experiment=lm"]}
# Commands of other programs, and modules without a parser of their own, with the tests that run
# them.
ELSEWHERE = {
    "git": "needs the network",
    "pip": "needs the network",
    "pre-commit": "needs the network",
    "cd": "of the shell",
    "echo": "of the shell",
    "cut": "of the shell",
    "grep": "of the shell",
    "source": "of the shell",
    "tail": "of the shell",
    "wandb": "of W&B",
    "scancel": "of Slurm: tests/slurm/test_slurm.py",
    "scontrol": "of Slurm: tests/slurm/test_slurm.py",
    ".ci/run": "CI runs it",
}
# Words that stand for something else. What a reader adds as `mine` is added and trained by
# tests/test_extending.py; a word in brackets is optional.
PLACEHOLDERS = {
    **{f"{group}=mine": "" for group in ("arch", "data", "optim", "sync", "experiment")},
    "data=bars": "",  # data/README.md shows how to add it: tests/data/test_guide.py
    "arch=bigram": "",  # so does models/language/README.md
    "arch=whole": "",  # and models/recursive/README.md
    "optim=sign_descent": "",  # and optim/README.md
    "sync=one_by_one": "",  # and optim/sync/README.md
    "arch=focal": "",  # docs/adding-an-objective.md shows how to add it: tests/test_extending.py
    "[RUN": "RUN",
    "…]": "",
}
# Modules that take positional arguments: how many, at least and at most.
POSITIONAL = {
    "models.llama": (2, 2),
    "utils.checkpoint": (1, 3),
    "utils.report": (1, 99),
}
SBATCH = {
    "-N", "-t", "-p", "-A", "--array", "--ntasks-per-node", "--gpus-per-node", "--gpus",
    "--cpus-per-task", "--signal", "--chdir", "--nodes", "--time",
}  # fmt: skip
MAKE_VARIABLES = {"PYTHON", "PART", "DATA", "OUT", "RANKS", "EPOCHS", "WAYS"}
WRONG = (AssertionError, ConfigError, HydraException, SystemExit, OSError, ValueError)
ALL = [command for path in files() for command in commands(path)]


def check(command: Command) -> None:
    """Raise an error that names what is wrong with a command; KeyError for one nobody covers."""
    program = (
        command.words[0] if "/" not in command.words[0] else command.words[0].split("bin/")[-1]
    )
    arguments = [PLACEHOLDERS.get(word, word) for word in command.words[1:]]
    arguments = [re.sub(r"=K$", "=1", word) for word in arguments if word]
    if program in ELSEWHERE or "evaluate.py" in arguments:
        return
    if re.fullmatch(r"launch/\w+\.sh", program):
        check_script(program, arguments, command)
    else:
        PROGRAMS[program](arguments, command)


def check_python(arguments: list[str], command: Command) -> None:
    if arguments[:1] == ["pretrain.py"]:
        check_pretrain(arguments[1:])
    else:
        assert arguments[:1] == ["-m"], "starts neither pretrain.py nor a module"
        check_module(arguments[1], arguments[2:])


def check_module(module: str, arguments: list[str]) -> None:
    if module.endswith(".NAME"):
        assert (ROOT / module.removesuffix(".NAME").replace(".", "/")).is_dir()
    elif not arguments:  # inline code that names it
        assert importlib.util.find_spec(module)
    elif module.startswith("data.build."):
        importlib.import_module(module).parser().parse_args(arguments)
    elif module in POSITIONAL:
        least, most = POSITIONAL[module]
        assert least <= len(arguments) <= most, f"{module} takes {least} to {most} arguments"
        assert importlib.util.find_spec(module)
    elif module.startswith("tests.bench."):
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        unknown = [word for word in arguments if word[:2] == "--" and f'"{word}"' not in source]
        assert not unknown, f"{module} has no option {unknown}"
    else:
        assert module in ("pip", "pytest"), f"{module}: not covered"


def check_pretrain(arguments: Sequence[str], ranks: int = 1) -> None:
    """Compose and resolve the configuration, each job of a sweep by itself; nothing runs."""
    overrides = [argument for argument in arguments if argument[:1] != "-"]
    if "--help" in arguments:
        return  # tests/utils/command/test_help.py
    options = {*arguments} - {*overrides}
    assert options <= {"-m", "--cfg", "--config-dir"}, f"unknown options {options}"
    if "--config-dir" in options:
        return  # tests/test_config.py
    if "--cfg" in options:
        overrides.remove("job")
    if "-m" not in options:
        resolve(overrides, ranks)
        return
    if "hydra/sweeper=optuna" in overrides:
        overrides = [first_of_range(word) for word in overrides if word[:6] != "hydra/"]
    for job in jobs(overrides):
        resolve(job, ranks, job)


def resolve(overrides: Sequence[str], ranks: int, job: list[str] | None = None) -> None:
    raw, choices = composed(tuple(prepare(overrides)))
    given = [override.partition("=")[0].lstrip("+~") for override in overrides]
    if {"eval_only", "checkpoint"} <= {*given} and not CHOICES & {*given}:
        raw = cli._adopt(raw, given, saved_config(raw.checkpoint))
    with initialize_config_dir(str(keys.CONF), **keys.VERSION):
        config.resolve(raw, choices, Launch(world_size=ranks), job)


@cache
def composed(overrides: tuple[str, ...]) -> tuple[Any, Mapping[str, str]]:
    with initialize_config_dir(str(keys.CONF), **keys.VERSION):
        raw = compose("pretrain", list(overrides), return_hydra_config=True)
    return raw, raw.hydra.runtime.choices


@cache
def saved_config(checkpoint: str) -> Mapping[Any, Any]:
    """The configuration that lies beside a checkpoint which the documentation names."""
    if checkpoint not in EVALUATED:
        return {}
    raw, choices = composed(tuple(EVALUATED[checkpoint]))
    with initialize_config_dir(str(keys.CONF), **keys.VERSION):
        saved: Any = OmegaConf.to_container(config.resolve(raw, choices, Launch()))
    return saved


def jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The first and the last job of a sweep."""
    parser = OverridesParser.create()
    values = []
    for override in parser.parse_overrides(list(overrides)):
        key = override.get_key_element()
        if override.is_sweep_override():
            values.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            values.append([str(override.input_line)])
    combinations = list(itertools.product(*values))
    return [list(combinations[0]), list(combinations[-1])]


def first_of_range(override: str) -> str:
    """An override whose range is replaced by where it begins."""
    return re.sub(r"=(?:tag\(\w+,)?(?:interval|range)\(([^,]+),[^)]*\)\)?$", r"=\1", override)


def check_torchrun(arguments: list[str], command: Command) -> None:
    if "pretrain.py" not in arguments:  # inline code that shows an option
        arguments = [*arguments, "pretrain.py"]
    at = arguments.index("pretrain.py")
    options = dict(word.partition("=")[::2] for word in paired(arguments[:at]))
    known = {"--nproc-per-node", "--nnodes", "--max-restarts", "--signals-to-handle"}
    assert options.keys() <= known, f"unknown options {options.keys() - known}"
    check_pretrain(arguments[at + 1 :], int(options.get("--nproc-per-node", "1")))


def paired(words: list[str]) -> list[str]:
    """`--a b` as `--a=b`."""
    return re.sub(r"(^| )(--?\w[\w-]*) (?!-)", r"\1\2=", " ".join(words)).split()


def check_mpi(arguments: list[str], command: Command) -> None:
    if "pretrain.py" in arguments:  # else inline code that shows an option
        at = arguments.index("pretrain.py")
        options = dict(word.partition("=")[::2] for word in paired(arguments[:at]))
        ranks = int(options.get("-np") or options.get("-n") or 1)
        check_pretrain(arguments[at + 1 :], ranks)


def check_script(script: str, arguments: list[str], command: Command, ranks: int = 1) -> None:
    """A script in launch/: its variables are in its text, its arguments are pretrain.py's."""
    ranks = int(dict(command.variables).get("RANKS", ranks))
    text = (ROOT / script).read_text() + (ROOT / "launch" / "job.sh").read_text()
    for name, _ in command.variables:
        assert name in text + (ROOT / "tests/bench/stages.py").read_text(), f"{name}: not used"
    if script == "launch/chain.sh":
        assert arguments[0].isdigit(), "chain.sh takes a number of jobs first"
        check_sbatch(arguments[1:], command)
    elif script == "launch/sweep.slurm":
        check_pretrain(["-m", *arguments])
    elif script == "launch/stages.slurm" or arguments == ["store"]:
        assert script in ("launch/stages.slurm", "launch/elastic.sh")
    else:
        check_pretrain(arguments, ranks)


def check_sbatch(arguments: list[str], command: Command) -> None:
    scripts = [at for at, word in enumerate(arguments) if word.startswith("launch/")]
    before = arguments[: scripts[0]] if scripts else arguments
    options = {re.match(r"--?[a-zA-Z-]+", word) for word in before if word[0] == "-"}
    named = {match[0] if match[0][:2] == "--" else match[0][:2] for match in options if match}
    assert named <= SBATCH, f"unknown options {named - SBATCH}"
    if scripts:  # else inline code that shows an option
        script = arguments[scripts[0]]
        check_script(script, arguments[scripts[0] + 1 :], command, ranks_of_job(before))


def ranks_of_job(options: list[str]) -> int:
    """The processes of a Slurm job by its size; on GPUs, torchrun starts one for each."""
    given = " ".join(options)
    size = {
        name: int(match[1])
        for name in ("-N", "--ntasks-per-node=", "--gpus-per-node=")
        if (match := re.search(rf"{name}(\d+)", given))
    }
    per_node = size.get("--ntasks-per-node=") or size.get("--gpus-per-node=") or 1
    return size.get("-N", 1) * per_node


def check_make(arguments: list[str], command: Command) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in arguments:
        if "=" in word:
            assert word.partition("=")[0] in MAKE_VARIABLES, f"{word}: no variable of a target"
        else:
            assert re.search(rf"^{re.escape(word)}:", text, re.MULTILINE), f"{word}: no target"
    assert {name for name, _ in command.variables} <= MAKE_VARIABLES


PROGRAMS: dict[str, Callable[[list[str], Command], None]] = {
    "python": check_python,
    "python3": check_python,
    "torchrun": check_torchrun,
    "mpirun": check_mpi,
    "mpiexec": check_mpi,
    "srun": check_mpi,
    "sbatch": check_sbatch,
    "make": check_make,
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_every_documented_command_is_right(path: Path) -> None:
    wrong = []
    for command in (each for each in ALL if each.where.partition(":")[0] == name_of(path)):
        try:
            check(command)
        except KeyError as error:
            wrong.append(f"{command.where}: {command}: nobody covers {error}; output is ```text")
        except WRONG as error:
            wrong.append(f"{command.where}: {command}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for number, target in links(path):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{name_of(path)}:{number}: {target} is not there"
        assert not anchor or anchor in anchors(there), f"{name_of(path)}:{number}: {target}"


def test_named_tests_exist() -> None:
    there = {str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")}
    there |= {name.rpartition("/")[2] for name in there}
    for path in files():
        for name in re.findall(r"`((?:[a-z_]+/)*test_[a-z0-9_]+\.py)`", path.read_text()):
            assert name.removeprefix("tests/") in there, f"{name_of(path)}: {name} is not there"


@pytest.mark.parametrize("recipe", sorted((ROOT / "conf/experiment").glob("*.yaml")), ids=name_of)
def test_a_recipe_begins_with_its_command_and_builds_what_that_reads(recipe: Path) -> None:
    comments = [line[2:] for line in recipe.read_text().splitlines() if line.startswith("# ")]
    text = "\n".join(comments[1:]).replace("\\\n", " ")
    lines = [comments[1], *re.findall(r"python -m data\.build\..*", text)]
    for line in lines:
        check(Command(name_of(recipe), (), tuple(shlex.split(line))))
    reads = re.findall(r" data_path=(\S+)", lines[0])
    assert reads == re.findall(r" --output-dir (\S+)", "\n".join(lines[1:]))


@pytest.mark.parametrize(("name", "most"), [("README.md", 9_000), ("RESULTS.md", 8_000)])
def test_the_first_pages_are_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_bytes()) <= most
