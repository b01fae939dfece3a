"""Typed keys: the class or function that takes a key has its type and bounds, which are read here.
A few keys are parameters; more are a class of `Keys`:

    def __init__(self, spec: Spec, width: Annotated[PositiveInt, Doc("of the hidden layer")]): ...
    def __init__(self, spec: Spec, keys: Sizes): ...

A signature is turned into such a class, and pydantic checks both alike (`instantiate.py`). The keys
of every run are in `root.py`. Defaults are in conf/, so that Hydra knows every key that can be set.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_type_hints

import hydra
import yaml
from pydantic import BaseModel, ConfigDict, create_model
from pydantic.fields import FieldInfo

from utils.command.marks import Keys, Mark, members
from utils.command.root import Plain, Root
from utils.errors import ConfigError, short
from utils.files import ROOT

CONF = ROOT / "conf"
# the package that defines the classes of each group
PACKAGES = {"arch": "models", "data": "data", "optim": "optim", "sync": "optim"}
GROUPS = tuple(PACKAGES)
# what a run passes first to what it makes at a path; all other parameters are keys
PASSED: dict[str, tuple[str, ...]] = {
    "arch": ("spec",),
    "arch.loss": ("model",),
    "data": ("run",),
    "sync": (),
    "optim.dense": ("parameters",),
    "optim.sparse": ("tables", "capacity", "dist"),
    "optim.schedule": ("length",),
}
NOT_FOR_RUNS = "data.build."  # writes datasets
# Hydra 1.4 warns of this argument, and 1.3 of its absence
HYDRA_ARGUMENTS: dict[str, Any] = {"version_base": None} if hydra.__version__ < "1.4" else {}


def parts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a configuration makes, by path: everything that a `_target_` takes."""
    arch, optim = config.get("arch", {}), config.get("optim", {})
    parts = {
        "arch": {key: value for key, value in arch.items() if key != "loss"},
        "arch.loss": arch.get("loss"),
        "data": config.get("data"),
        "sync": config.get("sync"),
        "optim.sparse": optim.get("sparse"),
        "optim.schedule": optim.get("schedule"),
    }
    for number, entry in enumerate(optim.get("dense", ())):
        parts[f"optim.dense[{number}].optimizer"] = entry["optimizer"]
    return {path: part for path, part in parts.items() if part is not None}


def find(part: Any, path: str) -> Callable[..., Any]:
    """Returns the class or function of this repository that the `_target_` of a part names.

    Only modules of the group's package are imported, and no file beside a dataset.
    """
    if not isinstance(part, Mapping):
        raise ConfigError(f"{path}={short(part)}: needs a _target_, and its keys beside it")
    package, target = PACKAGES[re.split(r"\W", path)[0]], str(part.get("_target_", "null"))
    where = f"{path}._target_={short(target)}"
    pattern = rf"{package}(\.[A-Za-z]\w*){{2,}}"
    if not re.fullmatch(pattern, target, re.ASCII) or target.startswith(NOT_FOR_RUNS):
        raise ConfigError(
            f"{where}: must be a class or function in {package}/, as {package}.module.Name"
        )
    module, _, name = target.rpartition(".")
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    folders = file.parents[: module.count(".")]
    if not file.is_file() or not all((folder / "__init__.py").is_file() for folder in folders):
        raise ConfigError(
            f"{where}: this repository has no module {module}, in folders with an __init__.py"
        )
    here = vars(importlib.import_module(module))
    # our modules import others, and their names must not leak
    defined = [key for key, thing in here.items() if getattr(thing, "__module__", "") == module]
    if name not in defined or not callable(here[name]):
        raise ConfigError(f"{where}: {module} defines {', '.join(sorted(defined))}")
    found: Callable[..., Any] = here[name]
    return found


def keys_of(part: Any, path: str) -> type[Keys]:
    """Returns the keys that the `_target_` of a part takes."""
    target, passed = find(part, path), PASSED[path.partition("[")[0]]
    for name in [*inspect.signature(target).parameters][: len(passed)]:
        if name in part:
            raise ConfigError(
                f"{path}.{name}: {part['_target_']} must take {', '.join(passed)} before its keys"
            )
    return _keys_of(target, len(passed))


class OfSignature(Keys):
    """Keys that are parameters: they are passed one by one."""

    model_config = ConfigDict(use_attribute_docstrings=False)  # there is no source to read


@functools.cache
def _keys_of(target: Callable[..., Any], passed: int) -> type[Keys]:
    made_by: Any = target
    made_by = made_by.__init__ if isinstance(target, type) else target
    hints = get_type_hints(made_by, include_extras=True)
    listed = hints.get("keys")
    if isinstance(listed, type) and issubclass(listed, Keys):
        return listed
    base: type[Keys] = OfSignature
    fields: dict[str, Any] = {}
    for each in [*inspect.signature(target).parameters.values()][passed:]:
        if each.kind is each.VAR_KEYWORD and isinstance(target, type):
            base = _keys_of(target.__mro__[1], passed)  # its parent takes the remaining keys
        elif each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            default = ... if each.default is each.empty else each.default
            fields[each.name] = (hints.get(each.name, Any), default)
    return create_model(target.__name__, __base__=base, **fields)


def fields_of(config: Plain) -> dict[str, FieldInfo]:
    """Returns the fields of all keys of a run, by path."""
    fields = dict(_fields("", Root))
    for path, part in parts_of(config).items():
        if "_target_" in part:  # else it builds on another file, which names its class
            fields |= dict(_fields(f"{path}.", keys_of(part, path)))
    return fields


def _fields(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for key, field in model.model_fields.items():
        yield f"{prefix}{key}", field
        for member in members(field.annotation):
            if isinstance(member, type) and issubclass(member, Keys):
                yield from _fields(f"{prefix}{key}.", member)


def is_marked(path: str, fields: Mapping[str, FieldInfo], *marks: Mark) -> bool:
    """True if a key, or a section around it, has one of these marks."""
    names = re.sub(r"\[\d+\](?!\.)", "", path).split(".")
    around = (".".join(names[:end]) for end in range(1, len(names) + 1))
    return any(mark in fields[key].metadata for key in around if key in fields for mark in marks)


def run_values(config: Plain, fields: Mapping[str, FieldInfo], *free: Mark) -> Plain:
    """The values that make a run what it is: without keys that have one of these marks. Lists are
    values, and compared whole.
    """
    return {
        path: value
        for path, value in leaves(config, into_lists=False)
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
    of_all = dict(_fields("", Root))
    takers: dict[str, list[str]] = {key: [] for key in of_all}
    for group in GROUPS:
        for file in sorted((CONF / group).glob("*.yaml")):
            config = yaml.safe_load(file.read_text(encoding="utf-8"))
            placed = config if group in config else {group: config}
            for key in fields_of(placed).keys() - of_all.keys() | placed.keys():
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
