"""Make what a config's `_target_` names: only things of this repository, and a mistake is one line, not a traceback."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from utils.errors import ConfigError

OURS = ("data.", "models.", "optim.")
TOO_LARGE = ("can't allocate memory", "size calculation overflowed")  # what PyTorch says of tensors that fit no memory


def plain(config: Any) -> Any:
    """Dicts and lists with every interpolation resolved."""
    return OmegaConf.to_container(config, resolve=True) if isinstance(config, (DictConfig, ListConfig)) else config


def parameters_of(config: Any, key: str) -> Mapping[str, inspect.Parameter]:
    """What the target takes, by name."""
    return inspect.signature(_locate(config, key)).parameters


def make(config: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Call the target with the config's keywords; `key` is where the config stands, for the error."""
    import hydra.utils  # slow to import, and only a run that builds needs it

    config = plain(config)
    target = _locate(config, key)
    given = {name: value for name, value in config.items() if not name.startswith("_")}
    try:
        inspect.signature(target).bind(*args, **given, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{key}: {config['_target_']} {error}; it takes {_described(target)}") from None
    # Hydra converts nested values; the call itself stays ours, so that tensors never pass through its config.
    built = hydra.utils.instantiate(config, _partial_=True, _convert_="all")
    try:
        return built(*args, **kwargs)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in TOO_LARGE):
            raise
        raise ConfigError(f"{key}: {config['_target_']}({_values(given)}): {_one_line(error)}") from error


def _locate(config: Any, key: str) -> Any:
    import hydra.utils

    target = config.get("_target_") if isinstance(config, (Mapping, DictConfig)) else None
    if not isinstance(target, str):
        raise ConfigError(f"{key}={config}: needs a _target_; for example _target_: optim.adam_atan2.AdamATan2")
    if not target.startswith(OURS):
        raise ConfigError(f"{key}._target_={target}: only things of this repository can be made; choose one under data, models or optim")
    try:
        found = hydra.utils.get_object(target)
    except Exception as error:  # Hydra raises several kinds; every one means that the name is wrong
        raise ConfigError(f"{key}._target_={target}: not found; {_one_line(error)}") from None
    if not str(getattr(found, "__module__", "")).startswith(OURS):  # our modules import others, and their names must not leak
        raise ConfigError(f"{key}._target_={target}: comes from {getattr(found, '__module__', 'elsewhere')}; name something defined here")
    return found


def _described(target: Any) -> str:
    return ", ".join(inspect.signature(target).parameters)


def _values(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
