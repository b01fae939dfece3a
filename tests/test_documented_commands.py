"""Every command of ours in a *.md file or at the head of a recipe is parsed by what it calls."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from tests.documented import Command, anchors, commands, fenced, files, links
from tests.ranks import ROOT
from tests.runs import launched
from utils.command import cli, config, keys
from utils.command.arguments import DEFINE_A_RUN, prepare
from utils.command.naming import SweepJob
from utils.errors import ConfigError
from utils.ranks.launchers import Launch

# What a command evaluates, by the folder that it names: the arguments of the run that lies there.
EVALUATED = {
    "runs/demo/demo": ["experiment=demo"],
    "runs/lm/lm": ["experiment=lm"],
    "runs/latent/facts": ["experiment=latent_facts"],
}
# Words that stand for something else. What a reader adds as `mine` is added and trained by
# tests/test_extending.py; a word in brackets is optional.
PLACEHOLDERS = {
    **{f"{group}=mine": "" for group in ("arch", "data", "optim", "sync", "experiment")},
    "data=table": "",  # data/README.md shows how to add it: tests/test_extending.py
    "optim=sign_descent": "",  # so does optim/README.md
    "sync=one_by_one": "",
    "arch=focal": "",  # docs/adding-an-objective.md shows how to add it: tests/test_extending.py
    "arch=contrast": "",
    "[RUN": "RUN",
    "…]": "",
}
# Modules that take positional arguments: how many, at least and at most.
POSITIONAL = {"models.language.llama": (2, 2), "utils.checkpoint": (1, 4), "utils.report": (1, 99)}
RANKS = re.compile(r"(?:RANKS=|--nproc-per-node[ =]|-np? )(\d+)")
WRONG = (AssertionError, ConfigError, HydraException, SystemExit, OSError, ValueError)
MACHINE = "(?:Xeon|EPYC|EPYC-2|H100|H200)"
MEASURED = re.compile(  # the machine, the commit, and the keys of its recipe that changed since
    rf"{MACHINE}(?: and {MACHINE})?, (?P<commit>[0-9a-f]{{7}})(?: \(since: (?P<changed>`.+`)\))?"
)
ALL = [command for path in files() for command in commands(path)]
# The way from data to a comparison in each guide, and the keys that shorten its runs. What a run
# needs is trained first, and is shortened where it is named.
SHORT = "max_steps=4 epochs=null eval_interval=null eval_examples=8 compile=false"
TARGET = "arch.target='\"experiment=tms_target max_steps=4\"'"
READER = '"experiment=fact_reader max_steps=2 data.tokenizer={}"'
READERS = f"arch.readers='[{READER.format('bytes')},{READER.format('bpe:290')}]'"
GUIDES = {
    ("docs/recursive.md", "In one screen"): SHORT,
    ("docs/recursive.md", "A task of your own"): SHORT,
    ("docs/language.md", "In one screen"): SHORT,
    ("docs/decomposition.md", "In one screen"): f"{SHORT} {TARGET}",
    ("docs/latent.md", "In one screen"): f"{SHORT} {READERS}",
    ("models/README.md", "digits"): SHORT,
}


def check(command: Command) -> None:
    """Raise an error that names what is wrong with a command of ours."""
    words = [PLACEHOLDERS.get(word, word) for word in command.words]
    words = [re.sub(r"=K$", "=1", word) for word in words if word]
    program = words[0].split("bin/")[-1]
    ranks = int(found[1]) if (found := RANKS.search(str(command))) else 1
    scripts = [at for at, word in enumerate(words) if word.startswith("launch/")]
    if "pretrain.py" in words:
        check_pretrain(words[words.index("pretrain.py") + 1 :], ranks)
    elif scripts:  # the last, of a script that starts another
        script, given = words[scripts[-1]], words[scripts[-1] + 1 :]
        assert (ROOT / script).exists()
        if script != "launch/stages.slurm" and given != ["store"]:
            check_pretrain(["-m", *given] if script == "launch/sweep.slurm" else given, ranks)
    elif program in ("python", "python3") and words[1] == "-m":
        check_module(words[2], words[3:])
    elif program == "make":
        text = (ROOT / "Makefile").read_text()
        for word in words[1:]:
            assert "=" in word or f"\n{word}:" in text, f"{word}: no target"


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
    elif module == "utils.prove":  # takes the keys of a run
        check_pretrain(arguments)
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
        resolve(tuple(overrides), ranks)
        return
    if "hydra/sweeper=optuna" in overrides:
        overrides = [first_of_range(word) for word in overrides if word[:6] != "hydra/"]
    for job in jobs(overrides):
        resolve(job, ranks, sweeps=True)


@cache
def resolve(overrides: tuple[str, ...], ranks: int, sweeps: bool = False) -> None:
    raw, choices = composed(tuple(prepare(overrides)))
    given = [override.partition("=")[0].lstrip("+~") for override in overrides]
    if {"eval_only", "checkpoint"} <= {*given} and not DEFINE_A_RUN & {*given}:
        raw = cli._adopt(raw, given, saved_config(raw.checkpoint))
    job = SweepJob(overrides) if sweeps else None
    with initialize_config_dir(str(keys.CONF), **keys.HYDRA_ARGUMENTS):
        config.resolve(raw, choices, Launch(world_size=ranks), job)


@cache
def composed(overrides: tuple[str, ...]) -> tuple[Any, Mapping[str, str]]:
    with initialize_config_dir(str(keys.CONF), **keys.HYDRA_ARGUMENTS):
        raw = compose("pretrain", list(overrides), return_hydra_config=True)
    return raw, raw.hydra.runtime.choices


@cache
def saved_config(checkpoint: str) -> Mapping[Any, Any]:
    """The configuration that lies beside a checkpoint which the documentation names."""
    if checkpoint not in EVALUATED:
        return {}
    raw, choices = composed(tuple(EVALUATED[checkpoint]))
    with initialize_config_dir(str(keys.CONF), **keys.HYDRA_ARGUMENTS):
        return config.resolve(raw, choices, Launch()).plain()


def jobs(overrides: Sequence[str]) -> list[tuple[str, ...]]:
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
    return [combinations[0], combinations[-1]]


def first_of_range(override: str) -> str:
    """An override whose range is replaced by where it begins."""
    return re.sub(r"=(?:tag\(\w+,)?(?:interval|range)\(([^,]+),[^)]*\)\)?$", r"=\1", override)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_every_documented_command_is_right(path: Path) -> None:
    wrong = []
    for command in (each for each in ALL if each.where.partition(":")[0] == name_of(path)):
        try:
            check(command)
        except WRONG as error:
            wrong.append(f"{command.where}: {command}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for number, target in links(path):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{name_of(path)}:{number}: {target} is not there"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{name_of(path)}:{number}: {target}"


def test_the_page_of_the_api_is_that_of_the_contract() -> None:
    written = (ROOT / "docs/api.md").read_text()
    assert runpy.run_path(str(ROOT / "docs/api.py"))["page"]() == written, "run python docs/api.py"


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


def rows_of(page: str) -> list[list[str]]:
    """The cells of each row of the tables of claims."""
    tables = re.findall(r"^\| claim \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.M)
    lines = "".join(tables).splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_a_row_of_results_has_a_figure_a_command_and_a_commit() -> None:
    assert len(rows_of("RESULTS.md")) > 20
    for claim, figure, _, command, measured in rows_of("RESULTS.md"):
        assert figure, claim
        assert re.search(r"`(make|python) .+`|\]\(.+\)", command), claim
        assert MEASURED.fullmatch(measured), claim


def git(*words: str) -> str:
    """What git prints; nothing if it fails."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout


def conf_at(commit: str | None, path: str) -> dict[str, Any]:
    """A file of conf/ at a commit, or as it lies here; nothing if there is none."""
    there = ROOT / "conf" / path
    here = there.read_text() if there.exists() else ""
    return yaml.safe_load(git("show", f"{commit}:conf/{path}") if commit else here) or {}


def recipe(commit: str | None, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of a recipe at a commit, and those of the groups that it chooses."""
    own: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    read = conf_at(commit, f"experiment/{name}.yaml")
    read.pop("expected", None)  # a band that was written after the run
    for entry in read.pop("defaults", []):
        if isinstance(entry, dict):
            ((group, choice),) = entry.items()
            group = group.removeprefix("override /")
            own[group] = choice
            groups |= flat(conf_at(commit, f"{group}/{choice}.yaml"), f"{group}.")
        elif entry != "_self_":
            of_entry = recipe(commit, entry)
            own, groups = own | of_entry[0], groups | of_entry[1]
    return own | flat(read), groups


def flat(keys: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The keys of nested mappings, joined by dots."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository").strip() != "false", reason="needs git's history"
)
def test_a_row_of_results_names_a_commit_that_gives_it_or_the_keys_that_changed_since() -> None:
    wrong = []
    for claim, _, _, command, measured in rows_of("RESULTS.md"):
        match = MEASURED.fullmatch(measured)
        assert match, claim
        commit, changed = match["commit"], {*re.findall(r"`(.+?)`", match["changed"] or "")}
        for module in re.findall(r"python -m ([\w.]+)", command):
            assert git("show", f"{commit}:{module.replace('.', '/')}.py"), f"{claim}: no {module}"
        for name in re.findall(r"experiment=(\w+)", command):
            then, then_groups = recipe(commit, name)
            now, now_groups = recipe(None, name)
            differ = {key for key in then | now if then.get(key) != now.get(key)}
            # a key of a group that came later, or has moved, need not have changed the figure
            both = then_groups.keys() & now_groups.keys() - now.keys()
            differ |= {key for key in both if then_groups[key] != now_groups[key]}
            if differ != changed:
                wrong.append(f"{claim}: {name} at {commit} differs in {sorted(differ)}")
    assert not wrong, "\n".join(wrong)


def test_the_readme_quotes_results() -> None:
    quoted = rows_of("README.md")
    assert len(quoted) > 5
    assert [row for row in quoted if row not in [row[:3] for row in rows_of("RESULTS.md")]] == []


def in_a_clone(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as at the root of a clone, but leaves its files in `folder`."""
    if not (folder / "pretrain.py").exists():
        (folder / "pretrain.py").symlink_to(ROOT / "pretrain.py")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return launched(["env", f"PATH={path}", f"PYTHONPATH={ROOT}", *words], cwd=folder, timeout=800)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "heading"), GUIDES)
def test_a_guide_leads_from_data_to_a_comparison(page: str, heading: str, tmp_path: Path) -> None:
    """As a shell and Python run all blocks under the heading, in order."""
    section = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", (ROOT / page).read_text(), re.M | re.S)
    assert section
    short = f"python pretrain.py {GUIDES[page, heading]} experiment="
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", section[1], re.M | re.S):
        text = block.replace("make train ", "python pretrain.py experiment=demo ")
        text = text.replace("python pretrain.py experiment=", short)
        program = {"": ["bash", "-e", "-c"], "python": [sys.executable, "-c"]}.get(language)
        done = in_a_clone([*program, text], tmp_path) if program else None
        assert not done or done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("comparison.html"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_commands_show_the_same_run(tmp_path: Path) -> None:
    """As bash runs the README's block and the next, with four steps instead of sixty."""
    pages = (ROOT / "README.md", ROOT / "docs/the-same-run.md")
    lines = [line for page in pages for _, line, language in fenced(page) if language == ""]
    ours = re.compile(r"R=|for NAME|(python|torchrun) .*(\$R|max_steps=60|digest runs)")
    script = [line for line in lines if ours.match(line)]
    assert len(script) == 6
    text = "\n".join(script).replace("max_steps=60", "max_steps=4 data.embedded.test=16")
    done = in_a_clone(["bash", "-e", "-c", text], tmp_path)
    assert done.returncode == 0, done.stderr
    digests = re.findall(r"^.*\b[0-9a-f]{64}\b.*$", done.stdout, re.MULTILINE)
    assert len(digests) == 3
    assert len({re.findall(r"[0-9a-f]{64}", line)[0] for line in digests}) == 1
