"""Make what a config's `_target_` names: only things of this repository, and a mistake is one line, not a traceback."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from utils.errors import ConfigError, brief, short
from utils.files import ROOT

PACKAGES = {"arch": "models", "data": "data", "optim": "optim", "sync": "optim"}  # where what a group names is defined
NOT_FOR_RUNS = "data.build"  # writes datasets
PLACES = re.compile(r"(arch|arch\.loss|data|optim\.(sparse|schedule)|optim\.dense\[\d+\]\.optimizer|sync)\._target_")
SPECIAL = re.compile(r"(?:.*\.)?_[^.\[]*_(?=$|[.\[])")  # a path up to a key that Hydra's `instantiate` would obey
# What memory that cannot be had looks like: the CPU's allocator, sizes beyond 64 bits, and a GPU
NO_MEMORY = re.compile(r"allocat\w* memory|out of memory|overflow", re.IGNORECASE)


def plain(config: Any) -> Any:
    """Dicts and lists with every interpolation resolved."""
    return OmegaConf.to_container(config, resolve=True) if isinstance(config, (DictConfig, ListConfig)) else config


def check_special(path: str, value: Any) -> None:
    """Keys like `_target_` may stand only where this repository makes something; deeper ones would be called by nobody, or by others."""
    if not (found := SPECIAL.match(path)):
        return
    if not PLACES.fullmatch(path):
        raise ConfigError(f"{path}={value}: nothing is made here, values are plain; remove {found[0]}")
    find(path.removesuffix("._target_"), value)


def find(key: str, target: Any) -> tuple[str, str]:
    """Module and name of a target that a file of ours defines. Imports nothing: this must come fast, and importing runs code."""
    package = PACKAGES[re.split(r"\W", key)[0]]
    where = f"{key}._target_={target}"
    if not isinstance(target, str):
        raise ConfigError(f"{where}: must be a name like {package}.module.Name")
    if not target.startswith(f"{package}.") or f"{target}.".startswith(f"{NOT_FOR_RUNS}."):
        raise ConfigError(f"{where}: only things of this repository can be made; choose one under {package}")
    module, _, name = target.rpartition(".")
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py") if re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", target) else None
    inside = file.parents[: module.count(".")] if file else []
    if file is None or not file.is_file() or not all((folder / "__init__.py").is_file() for folder in inside):
        raise ConfigError(f"{where}: not found; it takes the form {package}.module.Name, with a module of this repository")
    defined = [node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    if name not in defined:  # our modules import others, and their names must not leak
        known = ", ".join(sorted(other for other in defined if not other.startswith("_")))
        raise ConfigError(f"{where}: not found; {module} defines {known}")
    return module, name


def parameters_of(config: Any, key: str) -> Mapping[str, inspect.Parameter]:
    """What the target takes, by name."""
    return inspect.signature(_locate(config, key)).parameters


def make(config: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Call the target with the config's keywords; `key` is where the config stands, for the error."""
    config = plain(config)
    target = _locate(config, key)
    given = {name: value for name, value in config.items() if name != "_target_"}
    try:
        inspect.signature(target).bind(*args, **given, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{key}: {config['_target_']} {error}; it takes {', '.join(inspect.signature(target).parameters)}") from None
    try:
        return target(*args, **given, **kwargs)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{key}: {config['_target_']}({_values(given)}): {brief(error)}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not NO_MEMORY.search(str(error)):
            raise
        raise ConfigError(f"{key}: {config['_target_']}({_values(given)}) needs {_amount(error)}; make it smaller") from None


def _locate(config: Any, key: str) -> Any:
    if not isinstance(config, (Mapping, DictConfig)) or config.get("_target_") is None:
        raise ConfigError(f"{key}={short(config)}: needs a _target_; for example _target_: optim.adam_atan2.AdamATan2")
    module, name = find(key, config["_target_"])
    return getattr(importlib.import_module(module), name)


def _values(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _amount(error: Exception) -> str:
    tried = re.search(r"tried to allocate (\d+) bytes", str(error))
    return f"memory that this machine does not have{f' ({int(tried[1]) / 2**30:,.0f} GiB at once)' if tried else ''}"
