"""`--help`: the keys of conf/ with their defaults, types, bounds and descriptions."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from utils.command import keys
from utils.command.arguments import CHOSEN, WITH_VALUE
from utils.command.keys import (
    A_PATH,
    A_RUN,
    GROUPS,
    LITERAL,
    MAY_CHANGE,
    NAMES_PROJECT,
    SAME_RUN,
    Rules,
)
from utils.command.values import BOUNDS, leaves, type_names
from utils.errors import ConfigError, short

WANTED = ("--help", "-h")
COMMAND = re.compile(r"# (after )?(python|torchrun) ")
KEY_WIDTH, DEFAULT_WIDTH = 32, 12
USAGE = """\
usage: python pretrain.py [experiment=NAME] [GROUP=NAME ...] [KEY=VALUE ...]

  --help KEY         one key: type, bounds, default and meaning
  --help GROUP       a group: its options, and the keys of the one that is chosen
  --help experiment  the recipes
  --cfg job          prints the configuration instead of running it
  -m                 runs every combination of values: -m seed=0,1,2 lr=1e-3,1e-4
"""
MEANING = {
    SAME_RUN: (
        "does not change what the run is: its derived name stays, and any start may change it"
    ),
    MAY_CHANGE: "changes the derived name, but a run with a run_name of its own goes on with it",
    A_RUN: "takes the folder of a run, or the arguments that make one: then it is made first",
    A_PATH: "must exist when the run starts",
    NAMES_PROJECT: "names the project, unless project_name does",
    LITERAL: "is taken as it is written, but for \\n, \\t and \\\\",
}


def is_wanted(arguments: Sequence[str]) -> bool:
    """Returns whether a command line asks for help."""
    return any(argument in WANTED for argument in arguments)


def answer(arguments: Sequence[str]) -> str:
    """The text for a command line with `--help`; a ConfigError names a key that does not exist."""
    choices, topics = _read(arguments)
    folders = keys.config_dirs(arguments)
    options = {group: _files(group, folders) for group in CHOSEN}
    for group, name in choices.items():
        if name not in options[group]:
            known = ", ".join(sorted(options[group]))
            raise ConfigError(f"{group}={short(name)}: unknown; choose one of {known}")
    if "experiment" in choices:
        choices = _chosen_by(options["experiment"], choices["experiment"]) | choices
    choices = _defaults() | choices
    if topics:
        return "\n\n".join(_topic(topic, choices, options) for topic in topics)
    return _overview(choices, options)


def _read(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the choices of groups, and the topics."""
    choices, topics = {}, []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        option, _, value = argument.partition("=")
        if argument.startswith("-") or before in WITH_VALUE:
            continue
        elif not value:
            topics.append(option)
        elif option.lstrip("+") in CHOSEN:
            choices[option.lstrip("+")] = value
    return choices, topics


def _files(group: str, folders: Sequence[Path]) -> dict[str, Path]:
    """The options of a group by name."""
    added = [path for folder in folders for path in (folder / group).glob("*.yaml")]
    return {path.stem: path for path in (*added, *sorted((keys.CONF / group).glob("*.yaml")))}


def _defaults() -> dict[str, str]:
    """Returns the choice that `pretrain.yaml` makes in each group."""
    entries = _defaults_list(keys.CONF / "pretrain.yaml")
    chosen = {group: name for entry in entries for group, name in _pairs(entry)}
    return {group: chosen[group] for group in GROUPS}


def _chosen_by(experiments: Mapping[str, Path], name: str) -> dict[str, str]:
    """Returns an experiment's choices in each group, its own and those of files it builds on."""
    chosen: dict[str, str] = {}
    for entry in _defaults_list(experiments[name]):
        if isinstance(entry, str) and entry in experiments:
            chosen |= _chosen_by(experiments, entry)
        for group, choice in _pairs(entry):
            chosen[group.removeprefix("override").strip(" /")] = choice
    return {group: choice for group, choice in chosen.items() if group in GROUPS}


def _defaults_list(file: Path) -> list[Any]:
    written = yaml.load(file.read_text(encoding="utf-8"), Loader=keys.LOADER)
    return list((written or {}).get("defaults", []))


def _pairs(entry: Any) -> list[tuple[str, str]]:
    return list(entry.items()) if isinstance(entry, dict) else []


def _overview(choices: Mapping[str, str], options: Mapping[str, Mapping[str, Path]]) -> str:
    lines = [USAGE]
    for group in CHOSEN:
        chosen = f" (here {choices[group]})" if group in choices else ""
        names = ", ".join(sorted(options[group]))
        lines += _wrap_text(f"  {group}=", f"{names}{chosen}", indent=14)
    files = {"": keys.CONF / "pretrain.yaml"} | {
        group: options[group][choices[group]] for group in GROUPS
    }
    for group, file in files.items():
        title = f"{group}={choices[group]}: {_about(file)}" if group else "Every run"
        lines += ["", *_wrap_text("", title, indent=0), *_list(*keys.read(file, group))]
    return "\n".join(lines)


def _topic(
    topic: str, choices: Mapping[str, str], options: Mapping[str, Mapping[str, Path]]
) -> str:
    """One key, a section of keys, a group, or the experiments."""
    if topic == "experiment" or topic in GROUPS:
        lines = [f"{topic}=" + (f"{choices[topic]}  (the choice here)" if topic in choices else "")]
        for name, file in sorted(options[topic].items()):
            lines += _wrap_text(f"  {name}", _about(file), indent=20)
        if topic in GROUPS:
            listed = _list(*keys.read(options[topic][choices[topic]], topic))
            lines += ["", f"Keys of {topic}={choices[topic]}", *listed]
        return "\n".join(lines)
    blocks = []
    for group in ("", *GROUPS):
        files = options[group] if group else {"": keys.CONF / "pretrain.yaml"}
        for name, file in sorted(files.items(), key=lambda item: item[0] != choices.get(group)):
            defaults, rules = keys.read(file, group)
            below = {path: rule for path, rule in rules.items() if path.startswith(f"{topic}.")}
            home = f"{group}={name}" if group else ""
            if below:
                blocks.append("\n".join([f"{topic} ({home})" if home else topic]))
                blocks[-1] += "\n" + "\n".join(_list(defaults, below))
            elif topic in rules:
                values = dict(leaves(OmegaConf.to_container(defaults), into_lists=False))
                blocks.append(_one(topic, home, values[topic], rules))
    if not blocks:
        raise ConfigError(f"--help {short(topic)}: {keys.unknown(topic)}")
    return "\n\n".join(dict.fromkeys(blocks))


def _list(defaults: Any, rules: Rules) -> list[str]:
    """A line for each key that can be set, below the comments that head them."""
    values = dict(leaves(OmegaConf.to_container(defaults), into_lists=False))
    lines: list[str] = []
    heading = ""
    for path, rule in rules.items():
        heading = rule.heading or heading
        if rule.follows or path not in values or path.endswith("_target_") or "[" in path:
            continue
        if heading:
            lines += ["", *_wrap_text("", heading, indent=0)]
        heading = ""
        left = f"  {path:<{KEY_WIDTH}} {short(values[path]):<{DEFAULT_WIDTH}}"
        lines += _wrap_text(left, rule.about, KEY_WIDTH + DEFAULT_WIDTH + 4)
    return lines


def _one(path: str, home: str, default: Any, rules: Rules) -> str:
    """All that conf/ says of a key."""
    rule = rules[path]
    if rule.follows:
        return f"{path}\n    always has the value of {rule.follows}; set {rule.follows} instead"
    lines = [f"{path}={short(default)}" + (f"  ({home})" if home else "")]
    bounds = [f"{BOUNDS[sign][0]} {bound}" for sign, bound in rule.bounds]
    bounds += [f"a divisor of {path.rpartition('.')[0]}.{rule.divides}"] if rule.divides else []
    lines.append("    " + type_names(rule.holds or (type(default),)))
    if bounds:
        lines[-1] += f"; {' and '.join(bounds)}"
    sentences = [rule.about]
    names = path.split(".")
    above = {".".join(names[:end]) for end in range(1, len(names) + 1)} & rules.keys()
    marks = {mark for key in above for mark in rules[key].marks}
    sentences += [meaning for mark, meaning in MEANING.items() if mark in marks]
    for text in filter(None, sentences):
        lines += _wrap_text("", text, indent=4)
    return "\n".join(lines)


def _about(file: Path) -> str:
    """The first lines of the comment that opens a file, after its package and its command, as far
    as the first that ends a sentence.
    """
    about: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if keys.GLOBAL.match(f"{line}\n") or COMMAND.match(line):
            continue
        if not line.startswith("#"):
            break
        about.append(line.lstrip("# "))
        if line.endswith((".", ":")):
            break
    return " ".join(about)


def _wrap_text(left: str, text: str, indent: int) -> list[str]:
    """`left` and then `text`, whose lines all begin in the same column."""
    width = max(80, min(140, shutil.get_terminal_size((110, 0)).columns))
    before = [left] if len(left) >= indent > 0 else []
    lines = textwrap.wrap(
        text,
        width,
        initial_indent="" if before else left.ljust(indent),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
    if before:
        lines = [
            *before,
            *(" " * indent * (not number) + line for number, line in enumerate(lines)),
        ]
    return lines or [left.rstrip()]
