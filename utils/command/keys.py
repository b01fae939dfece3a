"""Reads conf/: the default of each key, and from the comment behind it what else it may hold, what
it means to a run, and its description.

`conf/pretrain.yaml` explains the brackets in these comments. They are comments so that Hydra, the
command line and a run's files never see them: a table beside the keys would itself be a key.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from utils.command.instantiate import PACKAGES
from utils.command.values import NAMES, WORDS, Rule, check_value, is_interpolation, leaves
from utils.errors import ConfigError, short
from utils.files import ROOT

CONF = ROOT / "conf"
GROUPS = tuple(PACKAGES)
MARKS = SAME_RUN, MAY_CHANGE, NAMES_PROJECT, A_RUN, A_PATH, LITERAL = (
    "same run",
    "may change",
    "names the project",
    "a run",
    "a path",
    "literal",
)
HOLDS = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "list of str": WORDS,
    "group": dict,
    "true": True,
    "false": False,
    "null": None,
}
BRACKETS = re.compile(r":?\s*#\s*\[([^]]*)")
COMMENT = re.compile(r":?\s*#\s*(?:\[[^]]*\])?\s*(.*)")
WORD = re.compile(r"\w+")
BOUND = re.compile(r"(>=|>|<=|<)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)")
GLOBAL = re.compile(r"\s*#\s*@package\s+_global_\s")
FOLLOWING = re.compile(r"\$\{(\w+)\}")
DIVIDES = re.compile(r"divides (\w+)")
# how alike two names must be, from 0 to 1; and those that are nearly as much so as the most alike
ALIKE, TIED, CONTAINED = 0.75, 0.06, 0.8

# where PyYAML was built with libyaml, ten times as fast
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Plain = dict[str, Any]
Rules = dict[str, Rule]


def defaults_and_rules(choices: Mapping[str, str]) -> tuple[Plain, Rules]:
    """Returns the default and the rule of every key of a run with these choices."""
    for group in GROUPS:
        check_choice(group, choices.get(group))
    contents = [
        read(CONF / "pretrain.yaml"),
        *(read(files(group)[choices[group]], group) for group in GROUPS),
    ]
    defaults: Any = OmegaConf.to_container(
        OmegaConf.merge(*(part[0] for part in contents)), resolve=True
    )
    return defaults, {path: rule for _, rules in contents for path, rule in rules.items()}


def all_rules() -> Rules:
    """Returns the rules of the keys of all choices."""
    return {
        path: rule
        for rules in (read(CONF / "pretrain.yaml")[1], *_choices().values())
        for path, rule in rules.items()
    }


def run_values(config: Mapping[Any, Any], rules: Rules, *free: str) -> Plain:
    """The values that make a run what it is: without keys that have one of these marks or follow
    another key.
    """
    values = dict(leaves(config, into_lists=False))
    own = {path: value for path, value in values.items() if not _follows(path, values, rules)}
    return {path: value for path, value in own.items() if not is_marked(path, rules, *free)}


def _follows(path: str, values: Mapping[str, Any], rules: Rules) -> bool:
    """Returns whether a key follows a root key; the file of another choice may give it its own
    value.
    """
    followed = rules[path].follows if path in rules else ""
    return bool(followed) and values[path] == values.get(followed, values[path])


def is_marked(path: str, rules: Rules, *marks: str) -> bool:
    """Returns whether a key, or a section around it, has one of these marks."""
    names = path.partition("[")[0].split(".")
    sections = (".".join(names[:end]) for end in range(1, len(names) + 1))
    return any(rules[section].marks & {*marks} for section in sections if section in rules)


def unknown(path: str) -> str:
    """The message for a key that the run at hand does not have."""
    choices = _choices()
    if homes := [choice for choice, rules in choices.items() if path in rules]:
        group = homes[0].partition("=")[0]
        return f"the {group} chosen here has no such key; it belongs to {', '.join(homes)}"
    own = read(CONF / "pretrain.yaml")[1]
    settable = {
        key
        for rules in (own, *choices.values())
        for key, rule in rules.items()
        if not rule.follows and "[" not in key and not key.endswith("_target_")
    }
    near = nearest(path, settable)
    if near:
        *others, last = near
        return f"unknown key; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    section = path.partition(".")[0]
    if section not in GROUPS and not any(key.startswith(f"{section}.") for key in own):
        section = ""
    return f"unknown key; --help{section and f' {section}'} lists the keys{section and ' there'}"


def nearest(path: str, known: Iterable[str]) -> list[str]:
    """The keys that `path` may be a misspelling of, best first.

    The last part of a key counts most, because users forget and mix up sections.
    """
    scores = {key: _likeness(path, key) for key in sorted(known)}
    best = max(scores.values(), default=0.0)
    near = [key for key, score in scores.items() if score >= max(ALIKE, best - TIED)]
    return sorted(near, key=lambda key: -scores[key])[:3]


def _likeness(path: str, key: str) -> float:
    """How alike two keys are: 0 to 1 for their names, and up to 0.1 more for the sections."""
    name, other = path.rpartition(".")[2], key.rpartition(".")[2]
    alike = _ratio(name, other)
    if path.replace(".", "_") == key.replace(".", "_"):
        alike = 1.0
    if len(name) >= 4 and {*name.split("_")} <= {*other.split("_")}:
        alike = max(alike, CONTAINED)
    return alike + _ratio(path, key) / 10


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def kept_by_machine() -> set[str]:
    """The root keys that say where and how a run is computed, reported or kept."""
    return {
        path for path, rule in read(CONF / "pretrain.yaml")[1].items() if SAME_RUN in rule.marks
    }


def choice_like(group: str, config: Mapping[Any, Any]) -> str:
    """The option of a group that has this configuration's target; of several, the most similar one.
    Else empty.
    """
    target, values = f"{group}._target_", dict(leaves(config))
    misses = {}
    for name, file in sorted(files(group).items()):
        with suppress(ValueError, OSError, yaml.YAMLError, OmegaConfBaseException):
            own = dict(leaves(OmegaConf.to_container(read(file, group)[0])))
            if own.get(target) == values.get(target):
                misses[name] = sum(
                    path not in values or values[path] != value
                    for path, value in own.items()
                    if not is_interpolation(value)
                )
    return min(misses, key=misses.__getitem__) if misses else ""


def check_choice(group: str, choice: Any) -> None:
    """Refuses a choice that its group does not offer."""
    if choice not in (names := sorted(files(group))):
        raise ConfigError(f"{group}={short(choice)}: unknown; choose one of {', '.join(names)}")


def files(group: str) -> dict[str, Path]:
    """Returns the options of a group. As in Hydra, conf/ comes before what --config-dir adds."""
    hydra = sys.modules.get("hydra.core.hydra_config")  # `--help` does not import it
    if hydra is not None and hydra.HydraConfig.initialized():
        sources = hydra.HydraConfig.get().runtime.config_sources
        added = [Path(source.path) for source in sources if source.provider == "command-line"]
    else:  # Hydra has failed to compose the configuration, or has not begun
        added = config_dirs(sys.argv[1:])
    return {
        path.stem: path for folder in (*added, CONF) for path in (folder / group).glob("*.yaml")
    }


def config_dirs(arguments: Sequence[str]) -> list[Path]:
    """Returns the folders that a command line adds by `--config-dir`."""
    options = ("--config-dir", "-cd")
    after = [value for option, value in pairwise(arguments) if option in options]
    joined = [argument.partition("=") for argument in arguments]
    return [Path(value) for value in after] + [
        Path(value) for option, _, value in joined if option == options[0] and value
    ]


def _choices() -> dict[str, Rules]:
    """The rules of every option; a file with mistakes is left out, and reported when chosen."""
    rules = {}
    for group in GROUPS:
        for name, file in sorted(files(group).items()):
            with suppress(ValueError, OSError, yaml.YAMLError, OmegaConfBaseException):
                rules[f"{group}={name}"] = read(file, group)[1]
    return rules


def read(file: Path, group: str = "", above: Sequence[Path] = ()) -> tuple[Any, Rules]:
    """The defaults in a file and the rules of its keys: below its group, or at the root if its
    package is _global_.

    An option also has the keys of those that it builds on; `above` are the files that build on it.
    """
    if file in above:
        raise ConfigError(f"{file}: builds on itself; remove that from its defaults")
    config, rules, bases = _read(file, group)
    for base in bases:
        defaults, inherited = read(base, group, (*above, file))
        config = OmegaConf.merge(defaults, config)
        rules = inherited | {
            path: _inheriting(rule, inherited.get(path, rule)) for path, rule in rules.items()
        }
    return config, rules


def _inheriting(rule: Rule, base: Rule) -> Rule:
    """The rule of a key with another default here: that of its base, unless brackets say more."""
    if rule.holds or rule.bounds or rule.marks or rule.divides:
        return rule
    return replace(base, follows=rule.follows, about=rule.about or base.about)


def _read(file: Path, group: str) -> tuple[Any, Rules, list[Path]]:
    """The defaults and rules of a file alone, and the options that it builds on, the last first."""
    text = file.read_text(encoding="utf-8")
    # the same for all who ask, and nobody changes it: a start reads most files three times
    config, rules, entries = _parsed(text, file, group)
    return config, rules, _bases(entries, file, group)


@functools.cache
def _parsed(text: str, file: Path, group: str) -> tuple[Any, Rules, Sequence[Any]]:
    config: Any = OmegaConf.create(text)
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{file}: holds a list; write keys with their defaults")
    written: Any = OmegaConf.to_container(config)
    lines, rules = text.split("\n"), {}
    comments = text.split("\n")
    for path, default, end in _keys(yaml.compose(text, Loader=LOADER), written):
        brackets = BRACKETS.match(lines[end.line], end.column)
        lines[end.line] = ""  # what is left then stands behind no key
        try:
            rule = _rule(path, default, brackets)
            about, heading = _comment(comments, end), _heading(comments, end.line)
            rules[path] = replace(rule, about=about, heading=heading)
        except ConfigError as error:
            raise ConfigError(f"{file}, line {end.line + 1}: {error}") from None
    if stray := next(
        (number for number, line in enumerate(lines, start=1) if BRACKETS.match(line)), 0
    ):
        raise ConfigError(
            f"{file}, line {stray}: these brackets stand behind no key; put them behind the one"
            " that they are about"
        )
    entries = config.pop("defaults", None) or ()
    config.pop("hydra", None)
    if group and not GLOBAL.match(text):
        config, rules = (
            OmegaConf.create({group: config}),
            {f"{group}.{path}": rule for path, rule in rules.items()},
        )
    for path, default in leaves(OmegaConf.to_container(config)):
        follows = FOLLOWING.fullmatch(str(default))
        rules[path] = replace(rules.get(path, Rule()), follows=follows[1] if follows else "")
    return config, rules, entries


def _bases(entries: Iterable[Any], file: Path, group: str) -> list[Path]:
    """The options that a file's defaults name, the last first: in conf/, as in Hydra, else beside
    the file.
    """
    names = [f"{entry}.yaml" for entry in entries if isinstance(entry, str)]
    places = [(CONF / group / name, file.with_name(name)) for name in reversed(names)]
    files = [next(filter(Path.is_file, paths), None) for paths in places]
    return [path for path in files if path is not None]


def _keys(
    node: yaml.Node | None, written: Plain, above: str = ""
) -> Iterator[tuple[str, Any, yaml.Mark]]:
    """Yields every key on a line of its own, its default, and where they end."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        path, default = f"{above}{key.value}", written.get(key.value, {})
        block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        if path == "defaults":  # what is said of a group stands where pretrain.yaml chooses one
            for entry in value.value:
                yield from _keys(entry, {})
        elif path != "hydra":
            yield path, default, (key if block else value).end_mark
            yield from _keys(value if block else None, default, f"{path}.")


def _comment(lines: Sequence[str], end: yaml.Mark) -> str:
    """The description behind a key, which may go on below in the same column."""
    start = COMMENT.match(lines[end.line], end.column)
    if not start:
        return ""
    words, column = [start[1]], lines[end.line].index("#", end.column)
    for line in lines[end.line + 1 :]:
        if line[:column].strip() or line[column : column + 1] != "#":
            break
        words.append(line[column + 1 :].strip())
    return " ".join(words)


def _heading(lines: Sequence[str], number: int) -> str:
    """The comment right above a key, in its column; what opens a file is about all of it."""
    column = len(lines[number]) - len(lines[number].lstrip())
    above: list[str] = []
    for line in reversed(lines[:number]):
        if line[:column].strip() or line[column : column + 1] != "#":
            break
        above.insert(0, line[column + 1 :].strip())
    return " ".join(above) if len(above) < number else ""


def _rule(path: str, default: Any, brackets: re.Match[str] | None) -> Rule:
    """Parses the brackets: types, bounds and marks."""
    holds: list[Any] = []
    bounds, marks, divides = [], set(), ""
    if brackets and FOLLOWING.fullmatch(str(default)):
        raise ConfigError(
            f"{path}: always has the value of {default}; what is said of that key holds for it"
        )
    for item in map(str.strip, brackets[1].split(",")) if brackets else ():
        words = [word.strip() for word in item.split("|")]
        if item in MARKS:
            marks.add(item)
        elif divided := DIVIDES.fullmatch(item):
            divides = divided[1]
        elif bound := BOUND.fullmatch(item):
            value = float(bound[2])
            bounds.append((bound[1], int(value) if value.is_integer() else value))
        elif not holds and all(word in HOLDS or WORD.fullmatch(word) for word in words):
            holds = [HOLDS.get(word, word) for word in words]
        else:
            raise ConfigError(
                f"{path}: [{item}]: neither type, bound nor mark; write for example [int | null, >="
                " 1, may change]"
            )
    if default is None and not NAMES.keys() & {*holds}:
        raise ConfigError(
            f"{path}=null: must say what else it may hold; write for example [int] behind it"
        )
    if bounds and not {int, float} & {*holds, type(default)}:
        raise ConfigError(f"{path}: bounds are for numbers; write for example [int, >= 1]")
    right = (*holds, *([None] if default is None and None not in holds else []))
    rule = Rule(right, tuple(bounds), frozenset(marks), divides)
    if not is_interpolation(default):
        check_value(path, default, default, rule)
    return rule
