"""`--help`: the keys of a run with their defaults, types, bounds and meaning."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic.fields import FieldInfo
from typing_extensions import Doc

from utils.command import keys
from utils.command.arguments import GROUP_KEYS, WITH_VALUE, prepare
from utils.command.marks import Mark, members
from utils.errors import ConfigError, short

Fields = Mapping[str, FieldInfo]
WANTED = ("--help", "-h")
COMMAND = re.compile(r"# (@package|(after )?(python|torchrun) )")
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
WIDTH = 44  # of a key and its default
USAGE = """\
usage: python pretrain.py [experiment=NAME] [GROUP=NAME ...] [KEY=VALUE ...]

  --help KEY         one key: type, bounds, default and meaning
  --help GROUP       a group: its options, and the keys of the one that is chosen
  --help experiment  the recipes
  --cfg job          prints the configuration instead of running it
  -m                 runs every combination of values: -m seed=0,1,2 lr=1e-3,1e-4
"""


def answer(arguments: Sequence[str]) -> str:
    """The text for a command line with `--help`; a ConfigError names a key that does not exist."""
    words = [word for word in arguments if word not in WANTED]
    after = {words[i + 1] for i, word in enumerate(words[:-1]) if word in WITH_VALUE}
    topics = [word for word in words if "=" not in word and word[:1] != "-" and word not in after]
    overrides = prepare([word for word in words if "=" in word and word[:1] != "-"])
    folders = [Path(folder).absolute() for folder in sorted(after) if Path(folder).is_dir()]
    if folders:  # of --config-dir
        overrides.append(f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]")
    with initialize_config_dir(str(keys.CONF), **keys.HYDRA_ARGUMENTS):
        raw = compose("pretrain", overrides, return_hydra_config=True)
    config: Any = OmegaConf.to_container(raw)
    choices = config.pop("hydra")["runtime"]["choices"]
    fields = keys.fields_of(config)
    values = dict(keys.leaves(config)) | dict(keys.leaves(config, into_lists=False))
    if topics:
        return "\n\n".join(_topic(topic, fields, values, choices) for topic in topics)
    lines = [USAGE]
    for group in GROUP_KEYS:
        names = ", ".join(sorted(_options(group)))
        lines += _wrapped(f"  {group}=", f"{names} (here {choices.get(group)})", 14)
    for group in ("", *keys.GROUPS):
        title = f"{group}={choices[group]}" if group else "Every run"
        lines += ["", title, *_list(fields, values, group)]
    return "\n".join(lines)


def _topic(topic: str, fields: Fields, values: keys.Plain, choices: Mapping[str, str]) -> str:
    """Explains one key, a section of keys, a group, or the recipes."""
    if topic in GROUP_KEYS:
        lines = [f"{topic}={choices.get(topic)}  (the choice here)"]
        for name, file in sorted(_options(topic).items()):
            lines += _wrapped(f"  {name}", _about(file), 20)
        return "\n".join([*lines, "", *_list(fields, values, topic)]).rstrip()
    if listed := _list(fields, values, topic):
        return "\n".join([topic, *listed])
    if topic not in fields:
        raise ConfigError(f"--help {short(topic)}: {keys.unknown(topic)}")
    field = fields[topic]
    lines = [
        f"{topic}={short(values.get(topic))}",
        f"    {_type_text(field.annotation)}",
    ]
    bounds = [
        f"{sign} {getattr(mark, name)}"
        for mark in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(mark, name)
    ]
    lines[-1] += f"  ({', '.join(bounds)})" if bounds else ""
    marks = [mark.about for mark in field.metadata if isinstance(mark, Mark)]
    for text in filter(None, [_meaning(field), *marks]):
        lines += _wrapped("", text, 4)
    return "\n".join(lines)


def _list(fields: Fields, values: keys.Plain, section: str) -> list[str]:
    """A line for each key of a section, or of every run."""
    lines: list[str] = []
    for path, field in fields.items():
        of_group = path.partition(".")[0] in keys.GROUPS
        listed = path.startswith(f"{section}.") if section else not of_group
        if listed and path in values:
            value = short(values[path])
            lines += _wrapped(f"  {path:<30} {value:<12}", _meaning(field), WIDTH + 2)
    return lines


def _options(group: str) -> dict[str, Path]:
    return {path.stem: path for path in (keys.CONF / group).glob("*.yaml")}


def _about(file: Path) -> str:
    """The first sentences of the comment that opens a file, after its package and its command."""
    about: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if COMMAND.match(line):
            continue
        if not line.startswith("#"):
            break
        about.append(line.lstrip("# "))
        if line.endswith((".", ":")):
            break
    return " ".join(about)


def _wrapped(left: str, text: str, indent: int) -> list[str]:
    """`left` and then `text`, whose lines all begin in the same column."""
    width = max(80, min(140, shutil.get_terminal_size((110, 0)).columns))
    wrapped = textwrap.wrap(text, width - indent, break_on_hyphens=False) or [""]
    first = (
        left.ljust(indent) + wrapped[0]
        if len(left) < indent or not left
        else f"{left} {wrapped[0]}"
    )
    return [first.rstrip(), *(" " * indent + line for line in wrapped[1:])]


def _type_text(annotation: Any) -> str:
    """What a key may hold, in words."""
    names = {int: "int", float: "float", str: "str", bool: "true or false", type(None): "null"}
    words: list[str] = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            words += [str(choice).lower() for choice in get_args(member)]
        else:
            origin = get_origin(member) or member
            words.append(names.get(member, "list" if origin in (list, tuple) else "group of keys"))
    return " | ".join(words)


def _meaning(field: FieldInfo) -> str:
    """The help of a key."""
    docs = (mark.documentation for mark in field.metadata if isinstance(mark, Doc))
    return next(docs, field.description or "")
