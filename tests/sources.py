"""Makes a source as a run would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from data.source import RunSettings

T = TypeVar("T")
OF_THE_RUN = {field.name for field in fields(RunSettings)}


def opened(make: Callable[..., T], **given: Any) -> T:
    """Passes the keys of a run as `RunSettings`, and all others as they are."""
    run = RunSettings(**{name: value for name, value in given.items() if name in OF_THE_RUN})
    return make(run, **{name: value for name, value in given.items() if name not in OF_THE_RUN})
