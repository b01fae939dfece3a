"""Turns errors of Hydra and OmegaConf into one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from omegaconf.errors import OmegaConfBaseException

from utils.command.keys import files, unknown
from utils.errors import ConfigError, RunError, short


def explain(error: BaseException) -> str:
    """One line for an error of Hydra or OmegaConf; empty for any other error."""
    from hydra.errors import HydraException, OverrideParseException

    if not isinstance(error, HydraException | OmegaConfBaseException):
        return ""
    if isinstance(error.__cause__, ConfigError):  # of a sweeper of ours, which Hydra has made
        return str(error.__cause__)
    text = str(error)
    if match := re.search(r"Could not find '([\w/]+)/([^'/]*)'", text):
        group, name = match.groups()
        known = sorted(files(group)) or re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        return (
            f"{group}={name}: unknown; choose one of {', '.join(known)}"
            if known
            else f"{group}={name}: unknown key"
        )
    if match := re.search(r"Could not delete from config\. (?:The value of )?'([^']*)'", text):
        return f"~{match.group(1)}: every key is needed; remove ~{match.group(1)}"
    if match := re.search(r"Could not (?:override|append)[^']*'([^'=]+)(?:=([^']*))?'", text):
        key, value = match.groups()
        value = value or next(iter(re.findall(rf"\+{re.escape(key)}=(.*)", text)), None)
        return f"{key}{'=' + short(value) if value else ''}: {unknown(key)}"
    if match := re.search(r"Ambiguous value for argument '([^']*)'", text):
        return (
            f"{match.group(1)}: several values; add -m to run them all, or write a list as"
            " key=[a,b]"
        )
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        if value.startswith("~"):
            return (
                f"{error.override}: the shell has left the ~ as it is; write {key}=$HOME{value[1:]}"
            )
        return (
            f"{error.override}: cannot be read; write key=value, with quotes around special"
            " characters: 'key=\"a,b\"'"
        )
    if "does not support sweep type" in text:
        return (
            "interval(…): a range that somebody must draw from; add hydra/sweeper=optuna, or give"
            " values as key=1,2,3"
        )
    if match := re.search(r"Error merging override (.*)", text):
        return f"{match.group(1)}: that key holds something of another kind; conf/ shows what"
    return " ".join(text.split())


def blame(error: Exception, arguments: Sequence[str]) -> str:
    """One line for an error that ends Hydra before or around a job; empty if the command line is
    not to blame.
    """
    import yaml

    if isinstance(error, ConfigError | RunError | BrokenPipeError):
        return ""  # a line of ours already, or nobody there to read one
    if line := explain(error):
        return line
    if isinstance(error, OSError):
        path = str(error.filename or "")
        if not path:
            return f"the output cannot be written ({error.strerror or error}); make room for it"
        given = next(
            (
                argument
                for argument in arguments
                if (value := argument.partition("=")[2]) and path.startswith(value)
            ),
            path,
        )
        return (
            f"{given}: cannot be used ({error.strerror or error}); give a place that you may"
            " write to"
        )
    if isinstance(error, RecursionError):
        return "a file of conf/ or --config-dir builds on itself; remove that from its defaults"
    if isinstance(error, IndexError) and (empty := [a for a in arguments if "range(" in a]):
        return f"{empty[0]}: gives no value; give a range with some"
    if isinstance(error, UnicodeDecodeError):
        return f"a file of conf/ or --config-dir is no text in UTF-8 ({error.reason}); save it anew"
    if isinstance(
        error,
        ValueError
        | TypeError
        | LookupError
        | AttributeError
        | RecursionError
        | AssertionError
        | yaml.YAMLError,
    ):
        return (
            "the command line cannot be used:"
            f" {' '.join(str(error).split()) or type(error).__name__}"
        )
    return ""
