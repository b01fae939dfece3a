"""Makes what a configuration's `_target_` names: only things of this repository, and with errors of
one line.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from utils.command.marks import Keys
from utils.errors import ConfigError, brief, short
from utils.files import ROOT

# the package that defines the classes of each group
PACKAGES = {"arch": "models", "data": "data", "optim": "optim", "sync": "optim"}
NOT_FOR_RUNS = "data.build."  # writes datasets
TARGET = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*){2,}", re.ASCII)
# What memory that cannot be had looks like: the CPU's allocator, sizes beyond 64 bits, and a GPU
NO_MEMORY = re.compile(r"allocat\w* memory|out of memory|overflow", re.IGNORECASE)


def plain(config: Any) -> Any:
    """Dicts and lists with every interpolation resolved."""
    if isinstance(config, DictConfig | ListConfig):
        return OmegaConf.to_container(config, resolve=True)
    return config


def find(key: str, target: Any) -> Callable[..., Any]:
    """Returns the class or function of this repository that a target names.

    `key` is the place of the target in the configuration. Only modules of the key's package are
    imported: a file that somebody put beside a dataset is none.
    """
    package = PACKAGES[re.split(r"\W", key)[0]]
    where = f"{key}._target_={short(target)}"
    if (
        not isinstance(target, str)
        or not TARGET.fullmatch(target)
        or not target.startswith(f"{package}.")
        or target.startswith(NOT_FOR_RUNS)
    ):
        raise ConfigError(
            f"{where}: only things of this repository can be made, as {package}.module.Name"
        )
    module, _, name = target.rpartition(".")
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    packages = file.parents[: module.count(".")]
    if not file.is_file():
        raise ConfigError(f"{where}: this repository has no module {module}")
    for folder in packages:
        if not (folder / "__init__.py").is_file():
            raise ConfigError(
                f"{where}: {folder.relative_to(ROOT)} has no __init__.py; add an empty one"
            )
    here = vars(importlib.import_module(module))
    # our modules import others, and their names must not leak
    defined = [key for key, thing in here.items() if getattr(thing, "__module__", "") == module]
    if name not in defined or not callable(here[name]):
        raise ConfigError(f"{where}: {module} defines {', '.join(sorted(defined))}")
    found: Callable[..., Any] = here[name]
    return found


def parameters_of(config: Any, key: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_target_of(plain(config), key)).parameters


@functools.cache
def keys_class(target: Callable[..., Any]) -> type[Keys] | None:
    """Returns the class that lists a target's keys, if it has one."""
    made_by: Any = target
    made_by = made_by.__init__ if isinstance(target, type) else target
    listed = get_type_hints(made_by).get("keys")
    return listed if isinstance(listed, type) and issubclass(listed, Keys) else None


def make(config: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the target with the configuration's keywords; `key` is its place in the configuration,
    for errors.
    """
    config = plain(config)
    target = _target_of(config, key)
    keywords = {name: value for name, value in config.items() if name != "_target_"}
    call = (
        f"{config['_target_']}({', '.join(f'{name}={value}' for name, value in keywords.items())})"
    )
    try:
        if (listed := keys_class(target)) is not None:
            return target(*args, keys=listed(**keywords), **kwargs)
        return target(*args, **keywords, **kwargs)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{key}: {call}: {brief(error)}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not NO_MEMORY.search(str(error)):
            raise
        raise ConfigError(
            f"{key}: {call} needs memory that this machine does not have; make it smaller"
        ) from None


def _target_of(config: Any, key: str) -> Callable[..., Any]:
    if not isinstance(config, Mapping):
        raise ConfigError(f"{key}={short(config)}: needs a _target_")
    return find(key, config.get("_target_"))
