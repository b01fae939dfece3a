"""Typed keys: what a key may hold stands beside the class or function that takes it, which is read
here. A few keys stand in its signature; more are a class of `Keys`:

    def __init__(self, spec: Spec, width: Annotated[PositiveInt, Doc("of the hidden layer")]): ...
    def __init__(self, spec: Spec, keys: Sizes): ...

pydantic checks them. The keys of every run are in `root.py`. Defaults are in conf/, so that Hydra
knows every key.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

import hydra
import yaml
from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo
from typing_extensions import Doc

from utils.command.instantiate import PACKAGES, find, keys_class
from utils.command.marks import SAME_RUN, Keys, Mark, members
from utils.command.root import Root
from utils.errors import ConfigError, short
from utils.files import ROOT

CONF = ROOT / "conf"
GROUPS = tuple(PACKAGES)
# Hydra 1.4 warns of this argument, and 1.3 of its absence
HYDRA_ARGUMENTS: dict[str, Any] = {"version_base": None} if hydra.__version__ < "1.4" else {}
Plain = dict[str, Any]


def keys_of(part: Plain, path: str) -> type[BaseModel]:
    """Returns the model of the keys that the `_target_` of a part takes."""
    return _model_of(find(path, part.get("_target_")), path.partition("[")[0])


@functools.cache
def _model_of(target: Callable[..., Any], place: str) -> type[BaseModel]:
    if (listed := keys_class(target)) is not None:
        return listed
    parameters = [*inspect.signature(target).parameters.values()]
    given = GIVEN_BY_NAME.get(place) or {each.name for each in parameters[: GIVEN_FIRST[place]]}
    made_by: Any = target
    made_by = made_by.__init__ if isinstance(target, type) else target
    hints = get_type_hints(made_by, include_extras=True)
    taken: dict[str, Any] = {}
    if isinstance(target, type) and any(p.kind is p.VAR_KEYWORD for p in parameters):
        # its parent takes the remaining keys
        passed_on = _model_of(target.__mro__[1], place)
        taken = {key: (field.annotation, field) for key, field in passed_on.model_fields.items()}
    for parameter in parameters:
        if (
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            or parameter.name in given
        ):
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        taken[parameter.name] = (hints.get(parameter.name, Any), default)
    return create_model(target.__name__, __base__=Keys, **taken)


# how many parameters a run passes itself, and those that it passes by name
GIVEN_FIRST = {"arch": 1, "arch.loss": 1, "data": 1, "optim.dense": 1, "sync": 0}
GIVEN_BY_NAME = {
    "optim.sparse": {"tables", "capacity", "dist"},
    "optim.schedule": {"total_steps", "steps_per_epoch"},
}


def sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Plain]]:
    """Yields the parts of a configuration that a `_target_` takes, with their paths."""
    optim = config.get("optim") or {}
    listed = optim.get("dense")
    dense = listed if isinstance(listed, list) else []
    arch = config.get("arch") or {}
    parts = [
        ("arch", {key: value for key, value in arch.items() if key != "loss"} or None),
        ("arch.loss", arch.get("loss")),
        ("data", config.get("data")),
        ("sync", config.get("sync")),
        ("optim.sparse", optim.get("sparse")),
        ("optim.schedule", optim.get("schedule")),
        *(
            (f"optim.dense[{i}].optimizer", entry.get("optimizer"))
            for i, entry in enumerate(dense)
            if isinstance(entry, dict)
        ),
    ]
    for path, part in parts:
        if part is not None and not isinstance(part, dict):
            raise ConfigError(f"{path}={short(part)}: must be a group of keys with a _target_")
        if part is not None:
            yield path, part


def check(config: Plain) -> Plain:
    """Returns the configuration with every value in its proper type; raises ConfigError."""
    root = {key: value for key, value in config.items() if key not in GROUPS}
    checked = _check("", root, Root)
    checked |= {group: config[group] for group in GROUPS}
    for key in config["optim"] if isinstance(config["optim"], dict) else ():
        if key not in ("dense", "sparse", "schedule"):
            raise ConfigError(f"optim.{key}: unknown key; optim takes dense, sparse and schedule")
    for path, part in sections(config):
        values = {key: value for key, value in part.items() if key != "_target_"}
        _place(checked, path, _check(path, values, keys_of(part, path)))
    return checked


def _check(path: str, values: Plain, model: type[BaseModel]) -> Plain:
    try:
        made = model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_line(path, values, error)) from None
    return made.model_dump(exclude_unset=True)


def _line(path: str, section: Plain, error: ValidationError) -> str:
    """One line for the first key that is wrong: the key, the value, and what would be right."""
    said: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    for problem in error.errors(include_url=False):
        is_missing = problem["type"] == "missing"
        key, value = _place_of(path, section, problem["loc"], is_missing)
        text = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            text = unknown(key)
        elif is_missing:
            text = "is missing; every key needs a value in the yaml file"
        elif problem["msg"].startswith("Input should be "):
            text = f"must be {text}"
        said.setdefault(key, []).append(text)
        values[key] = value
    key, texts = next(iter(said.items()))
    first, *others = dict.fromkeys(texts)
    right = " or ".join([first, *(text.removeprefix("must be ") for text in others)])
    return f"{key}={short(values[key])}: {right}"


def _place_of(
    path: str, values: Any, location: tuple[int | str, ...], is_missing: bool
) -> tuple[str, Any]:
    """The key that an error is about, without the names of a union's members, and its value."""
    for step in location:
        if isinstance(values, Mapping) and step in values:
            path, values = f"{path}.{step}" if path else str(step), values[step]
        elif isinstance(values, Mapping) and is_missing and step == location[-1]:
            return f"{path}.{step}" if path else str(step), None
        elif isinstance(values, list) and isinstance(step, int) and step < len(values):
            path, values = f"{path}[{step}]", values[step]
    return path, values


def _place(config: Plain, path: str, part: Plain) -> None:
    """Puts a checked section in its place, beside what else is there."""
    section: Any = config
    for step in re.findall(r"\w+", path):
        section = section[int(step) if step.isdecimal() else step]
    section.update(part)


def fields_of(config: Plain) -> dict[str, FieldInfo]:
    """Returns the fields of all keys of a run, by path."""
    fields = dict(_fields("", Root))
    for path, part in sections(config):
        if "_target_" in part:
            fields |= dict(_fields(f"{path}.", keys_of(part, path)))
    return fields


def _fields(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for key, field in model.model_fields.items():
        yield f"{prefix}{key}", field
        for member in members(field.annotation):
            if isinstance(member, type) and issubclass(member, Keys):
                yield from _fields(f"{prefix}{key}.", member)


def is_marked(path: str, fields: Mapping[str, FieldInfo], *marks: Mark) -> bool:
    """Returns whether a key, or a section around it, has one of these marks."""
    names = re.sub(r"\[\d+\](?!\.)", "", path).split(".")
    around = (".".join(names[:end]) for end in range(1, len(names) + 1))
    return any(mark in fields[key].metadata for key in around if key in fields for mark in marks)


def kept_by_machine() -> set[str]:
    """The root keys that say where and how a run is computed, reported or kept."""
    return {key for key, field in Root.model_fields.items() if SAME_RUN in field.metadata} | {
        "sync"
    }


def run_values(config: Plain, fields: Mapping[str, FieldInfo], *free: Mark) -> Plain:
    """The values that make a run what it is: without keys that have one of these marks."""
    values = dict(leaves(config, into_lists=False))
    return {
        path: value
        for path, value in values.items()
        if not is_marked(path, fields, *free) and not path.startswith("sync.")
    }


def unknown(path: str) -> str:
    """The message for a key that the run at hand does not have."""
    takers_of = _takers()
    names: dict[str, list[str]] = {}
    for key in sorted(takers_of):
        names.setdefault(key.rpartition(".")[2], []).append(key)
    if takers := takers_of.get(path):
        return f"belongs to {', '.join(takers)}; --help {takers[0]} {path} explains it"
    last = path.rpartition(".")[2]
    near = [*get_close_matches(path.lower(), takers_of, 2, 0.8)]
    for name in get_close_matches(last.lower(), names, 3, 0.7):
        near += names[name][:2]
    if near := list(dict.fromkeys(near))[:4]:
        return f"unknown key; did you mean {' or '.join(near)}?"
    return "unknown key; --help lists the keys"


def _takers() -> dict[str, list[str]]:
    """All keys that there are, each with the choices that take it; those of every run have none."""
    takers: dict[str, list[str]] = {key: [] for key, _ in _fields("", Root)}
    for group in GROUPS:
        for file in sorted((CONF / group).glob("*.yaml")):
            config = yaml.safe_load(file.read_text(encoding="utf-8"))
            placed = config if group in config else {group: config}
            for key in placed.keys() & Root.model_fields.keys():
                takers[key].append(f"{group}={file.stem}")
            for path, part in sections(placed):
                if "_target_" not in part:
                    continue  # it builds on another file, which names its class
                for key, _ in _fields(f"{path}.", keys_of(part, path)):
                    takers.setdefault(key, []).append(f"{group}={file.stem}")
    return takers


def marked(
    config: Plain, fields: Mapping[str, FieldInfo], *marks: Mark
) -> Iterator[tuple[str, Any]]:
    """Yields every value whose key, or a section around it, has one of these marks."""
    for path, value in leaves(config):
        if is_marked(path, fields, *marks):
            yield path, value


def leaves(value: Any, path: str = "", into_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields every value that contains no others, with its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key), into_lists)
    elif isinstance(value, list) and value and into_lists:
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{number}]")
    else:
        yield path, value


def type_text(annotation: Any) -> str:
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


def about(field: FieldInfo) -> str:
    """The help of a key."""
    docs = (mark.documentation for mark in field.metadata if isinstance(mark, Doc))
    return next(docs, field.description or "")
