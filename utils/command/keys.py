"""What conf/ says of its keys: a default each, and in the brackets behind it what else it may hold and what it means to a run.

`conf/pretrain.yaml` explains the brackets. They are comments, so that Hydra, the command line and the files of a run never see them:
a table beside the keys would be a key itself.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from utils.command.instantiate import PACKAGES
from utils.command.values import NAMES, WORDS, Rule, checked, is_interpolation, leaves
from utils.errors import ConfigError, short
from utils.files import ROOT

CONF = ROOT / "conf"
GROUPS = tuple(PACKAGES)
MARKS = SAME_RUN, MAY_CHANGE, NAMES_PROJECT, A_RUN = "same run", "may change", "names the project", "a run"
HOLDS = {
    "bool": bool, "int": int, "float": float, "str": str, "list of str": WORDS, "group": dict, "true": True, "false": False, "null": None,
}  # fmt: skip
BRACKETS = re.compile(r":?\s*#\s*\[([^]]*)")
WORD = re.compile(r"\w+")
BOUND = re.compile(r"(>=|>|<=|<)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)")
GLOBAL = re.compile(r"\s*#\s*@package\s+_global_\s")
FOLLOWING = re.compile(r"\$\{(\w+)\}")

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # where PyYAML was built with libyaml, ten times as fast

Plain = dict[str, Any]
Rules = dict[str, Rule]


def known(choices: Mapping[str, str]) -> tuple[Plain, Rules]:
    """Every key of a run with these choices: its default, and its rule."""
    for group in GROUPS:
        check_choice(group, choices.get(group))
    parts = [read(CONF / "pretrain.yaml"), *(read(files(group)[choices[group]], group) for group in GROUPS)]
    defaults: Any = OmegaConf.to_container(OmegaConf.merge(*(part[0] for part in parts)), resolve=True)
    return defaults, {path: rule for _, rules in parts for path, rule in rules.items()}


def everywhere() -> Rules:
    """The rules of all choices."""
    return {path: rule for rules in (read(CONF / "pretrain.yaml")[1], *_choices().values()) for path, rule in rules.items()}


def run_values(config: Mapping[Any, Any], rules: Rules, *free: str) -> Plain:
    """What makes a run the run it is: every value, but those with one of these marks, and what only follows another."""
    values = dict(leaves(config, into_lists=False))
    own = {path: value for path, value in values.items() if not _follows(path, values, rules)}
    return {path: value for path, value in own.items() if not is_marked(path, rules, *free)}


def _follows(path: str, values: Mapping[str, Any], rules: Rules) -> bool:
    """Another choice's file may have a value of its own where this rule's has that of a root key."""
    followed = rules[path].follows if path in rules else ""
    return bool(followed) and values[path] == values.get(followed, values[path])


def is_marked(path: str, rules: Rules, *marks: str) -> bool:
    """Whether a key or a section that it stands in has one of these marks."""
    parts = path.partition("[")[0].split(".")
    places = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(rules[place].marks & {*marks} for place in places if place in rules)


def unknown(path: str) -> str:
    """What to say of a key that the run at hand does not have."""
    if homes := [choice for choice, rules in _choices().items() if path in rules]:
        return f"the {homes[0].partition('=')[0]} chosen here has no such key; it belongs to {', '.join(homes)}"
    near = difflib.get_close_matches(path, everywhere(), n=1, cutoff=0.5)
    return f"unknown key; did you mean {near[0]}?" if near else "unknown key; the files of conf/ list all keys"


def kept_by_machine() -> set[str]:
    """Root keys of all runs that say where and how one is computed, reported or kept."""
    return {path for path, rule in read(CONF / "pretrain.yaml")[1].items() if SAME_RUN in rule.marks}


def choice_like(group: str, config: Mapping[Any, Any]) -> str:
    """What a group offers for a target that is in this configuration; of several what has most values in common. Else empty."""
    target, values = f"{group}._target_", dict(leaves(config))
    misses = {}
    for name, file in sorted(files(group).items()):
        with suppress(ValueError, OSError, yaml.YAMLError, OmegaConfBaseException):
            own = dict(leaves(OmegaConf.to_container(read(file, group)[0])))
            if own.get(target) == values.get(target):
                misses[name] = sum(
                    path not in values or values[path] != value for path, value in own.items() if not is_interpolation(value)
                )
    return min(misses, key=misses.__getitem__) if misses else ""


def check_choice(group: str, choice: Any) -> None:
    """Every run has one option of each group."""
    if choice not in (names := sorted(files(group))):
        raise ConfigError(f"{group}={short(choice)}: unknown; choose one of {', '.join(names)}")


def files(group: str) -> dict[str, Path]:
    """What a group offers. As Hydra has it, conf/ comes before what --config-dir adds."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    added = [Path(source.path) for source in sources if source.provider == "command-line"]
    return {path.stem: path for folder in (*added, CONF) for path in (folder / group).glob("*.yaml")}


def _choices() -> dict[str, Rules]:
    """The rules of each. Files with mistakes are left out: whoever chooses one reads of it."""
    rules = {}
    for group in GROUPS:
        for name, file in sorted(files(group).items()):
            with suppress(ValueError, OSError, yaml.YAMLError, OmegaConfBaseException):
                rules[f"{group}={name}"] = read(file, group)[1]
    return rules


def read(file: Path, group: str = "") -> tuple[Any, Rules]:
    """The defaults of one file and the rules of its keys: below its group, or at the root where its package is _global_."""
    text = file.read_text(encoding="utf-8")
    config: Any = OmegaConf.create(text)
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{file}: holds a list; write keys with their defaults")
    written: Any = OmegaConf.to_container(config)
    lines, rules = text.split("\n"), {}
    for path, default, end in _keys(yaml.compose(text, Loader=LOADER), written):
        found = BRACKETS.match(lines[end.line], end.column)
        lines[end.line] = ""  # what is left then stands behind no key
        try:
            rules[path] = _rule(path, default, found)
        except ConfigError as error:
            raise ConfigError(f"{file}, line {end.line + 1}: {error}") from None
    if stray := next((number for number, line in enumerate(lines, start=1) if BRACKETS.match(line)), 0):
        raise ConfigError(f"{file}, line {stray}: these brackets stand behind no key; put them behind the one that they are about")
    for key in ("defaults", "hydra"):
        config.pop(key, None)
    if group and not GLOBAL.match(text):
        config, rules = OmegaConf.create({group: config}), {f"{group}.{path}": rule for path, rule in rules.items()}
    for path, default in leaves(OmegaConf.to_container(config)):
        follows = FOLLOWING.fullmatch(str(default))
        rules[path] = replace(rules.get(path, Rule()), follows=follows[1] if follows else "")
    return config, rules


def _keys(node: yaml.Node | None, written: Plain, above: str = "") -> Iterator[tuple[str, Any, yaml.Mark]]:
    """Every key that stands on a line of its own, its default, and where on that line the two end."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        path, default = f"{above}{key.value}", written.get(key.value, {})
        block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        if path == "defaults":  # what is said of a group stands where pretrain.yaml chooses one
            for entry in value.value:
                yield from _keys(entry, {})
        elif path != "hydra":
            yield path, default, (key if block else value).end_mark
            yield from _keys(value if block else None, default, f"{path}.")


def _rule(path: str, default: Any, found: re.Match[str] | None) -> Rule:
    """What the brackets say: what the key may hold, bounds and marks."""
    holds: list[Any] = []
    bounds, marks = [], set()
    if found and FOLLOWING.fullmatch(str(default)):
        raise ConfigError(f"{path}: always has the value of {default}; what is said of that key holds for it")
    for item in map(str.strip, found[1].split(",")) if found else ():
        words = [word.strip() for word in item.split("|")]
        if item in MARKS:
            marks.add(item)
        elif bound := BOUND.fullmatch(item):
            value = float(bound[2])
            bounds.append((bound[1], int(value) if value.is_integer() else value))
        elif not holds and all(word in HOLDS or WORD.fullmatch(word) for word in words):
            holds = [HOLDS.get(word, word) for word in words]
        else:
            raise ConfigError(f"{path}: [{item}]: neither type, bound nor mark; write for example [int | null, >= 1, may change]")
    if default is None and not NAMES.keys() & {*holds}:
        raise ConfigError(f"{path}=null: must say what else it may hold; write for example [int] behind it")
    if bounds and not {int, float} & {*holds, type(default)}:
        raise ConfigError(f"{path}: bounds are for numbers; write for example [int, >= 1]")
    rule = Rule((*holds, *([None] if default is None else [])), tuple(bounds), frozenset(marks))
    if not is_interpolation(default):
        checked(path, default, default, rule)
    return rule
