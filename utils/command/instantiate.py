"""Makes what a configuration's `_target_` names: only things of this repository, and with errors of
one line.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from utils.errors import ConfigError, brief, short
from utils.files import ROOT

# where what a group names is defined
PACKAGES = {"arch": "models", "data": "data", "optim": "optim", "sync": "optim"}
EXAMPLES = {
    "arch": "models.language.gpt.GPT",
    "data": "data.language.tokens.TokenSource",
    "optim": "optim.adam_atan2.AdamATan2",
    "sync": "optim.sync.ddp.DDP",
}
NOT_FOR_RUNS = "data.build"  # writes datasets
PLACES = re.compile(
    r"(arch|arch\.loss|data|optim\.(sparse|schedule)|optim\.dense\[\d+\]\.optimizer|sync)\._target_"
)
# a path up to a key that Hydra's `instantiate` would obey
SPECIAL = re.compile(r"(?:.*\.)?_[^.\[]*_(?=$|[.\[])")
# What memory that cannot be had looks like: the CPU's allocator, sizes beyond 64 bits, and a GPU
NO_MEMORY = re.compile(r"allocat\w* memory|out of memory|overflow", re.IGNORECASE)


def plain(config: Any) -> Any:
    """Dicts and lists with every interpolation resolved."""
    # signals are handled before OmegaConf is loaded, and `check_special` is needed before both
    from omegaconf import DictConfig, ListConfig, OmegaConf

    return (
        OmegaConf.to_container(config, resolve=True)
        if isinstance(config, (DictConfig, ListConfig))
        else config
    )


def check_special(path: str, value: Any) -> None:
    """Refuses keys like `_target_` where this repository does not make anything."""
    if not (match := SPECIAL.match(path)):
        return
    if not PLACES.fullmatch(path):
        raise ConfigError(
            f"{path}={value}: nothing is made here, values are plain; remove {match[0]}"
        )
    find(path.removesuffix("._target_"), value)


def find(key: str, target: Any) -> tuple[str, str]:
    """The module and name of a target that a file of ours defines.

    Imports nothing: that would be slow, and would run code.
    """
    module, definition = _definition(key, target)
    return module, definition.name


def literals_of(key: str, target: Any) -> dict[str, Any]:
    """Returns the constants that a target's class assigns in its body, read from its source.

    A sync states its traits this way. Nothing is imported, and a function has none.
    """
    _, definition = _definition(key, target)
    literals: dict[str, Any] = {}
    for node in definition.body if isinstance(definition, ast.ClassDef) else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            literals |= dict.fromkeys(names, node.value.value)
    return literals


def _definition(key: str, target: Any) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
    """The module of a target, and the statement there that defines it."""
    package = PACKAGES[re.split(r"\W", key)[0]]
    where = f"{key}._target_={target}"
    if not isinstance(target, str):
        raise ConfigError(f"{where}: must be a name like {package}.module.Name")
    if not target.startswith(f"{package}.") or f"{target}.".startswith(f"{NOT_FOR_RUNS}."):
        raise ConfigError(
            f"{where}: only things of this repository can be made; choose one under {package}"
        )
    module, _, name = target.rpartition(".")
    file = (
        ROOT.joinpath(*module.split(".")).with_suffix(".py")
        if re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", target)
        else None
    )
    inside = file.parents[: module.count(".")] if file else []
    if (
        file is None
        or not file.is_file()
        or not all((folder / "__init__.py").is_file() for folder in inside)
    ):
        raise ConfigError(
            f"{where}: not found; it takes the form {package}.module.Name, with a module of this"
            " repository"
        )
    defined = _defined(file.read_text(encoding="utf-8"))
    if name not in defined:  # our modules import others, and their names must not leak
        known = ", ".join(sorted(other for other in defined if not other.startswith("_")))
        raise ConfigError(f"{where}: not found; {module} defines {known}")
    return module, defined[name]


@functools.cache
def _defined(source: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """The classes and functions of a module by name."""
    return {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


def parameters_of(config: Any, key: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of the target, by name."""
    return inspect.signature(_locate(config, key)).parameters


def make(config: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the target with the configuration's keywords; `key` is its place in the configuration,
    for errors.
    """
    config = plain(config)
    target = _locate(config, key)
    given = {name: value for name, value in config.items() if name != "_target_"}
    try:
        inspect.signature(target).bind(*args, **given, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {config['_target_']} {error}; it takes"
            f" {', '.join(inspect.signature(target).parameters)}"
        ) from None
    try:
        return target(*args, **given, **kwargs)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{key}: {config['_target_']}({_values(given)}): {brief(error)}"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not NO_MEMORY.search(str(error)):
            raise
        raise ConfigError(
            f"{key}: {config['_target_']}({_values(given)}) needs {_amount(error)}; make it smaller"
        ) from None


def _locate(config: Any, key: str) -> Any:
    config = plain(config)
    if not isinstance(config, Mapping) or config.get("_target_") is None:
        example = EXAMPLES[re.split(r"\W", key)[0]]
        raise ConfigError(
            f"{key}={short(config)}: needs a _target_; for example _target_: {example}"
        )
    module, name = find(key, config["_target_"])
    return getattr(importlib.import_module(module), name)


def _values(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _amount(error: Exception) -> str:
    tried = re.search(r"tried to allocate (\d+) bytes", str(error))
    return (
        "memory that this machine does not"
        f" have{f' ({int(tried[1]) / 2**30:,.0f} GiB at once)' if tried else ''}"
    )
