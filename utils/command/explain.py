"""Errors that need no traceback, as one line: our own, and those of Hydra and OmegaConf."""

from __future__ import annotations

import re
import shlex

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from utils.command.keys import unknown
from utils.errors import ConfigError, PeerError, RankError, RunError, missing_package


def explain(error: BaseException) -> str:
    """One line for an error that says what is wrong; empty for any other error."""
    if isinstance(error, ConfigError | PeerError | RankError | RunError):
        return str(error)
    if isinstance(error.__cause__, ConfigError):  # of a plugin that Hydra has made
        return str(error.__cause__)
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return missing_package(error)
    if isinstance(error, OverrideParseException):
        name, _, value = error.override.partition("=")
        escaped = value.replace('"', '\\"')
        text = shlex.quote(f'{name}="{escaped}"')
        return f"{error.override}: cannot be read; where the value is a text, quote it: {text}"
    text = str(error)
    if named := re.search(r"Could not (?:override|append)[^']*'([^'=]+)", text):
        return f"{named[1]}: {unknown(named[1])}"
    key = getattr(error, "full_key", None)
    return (f"{key}: " if key else "") + " ".join(text.split())
