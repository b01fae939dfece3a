"""What a signature may say of a key, besides what pydantic has for types and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Mark:
    """What a key means to a run."""

    about: str


SAME_RUN = Mark(
    "does not change what the run is: its derived name stays, and any start may change it"
)
MAY_CHANGE = Mark("changes the derived name, but a run with a run_name of its own goes on with it")
NAMES_PROJECT = Mark("names the project, unless project_name does")
A_RUN = Mark("takes the folder of a run, or the arguments that make one: then it is made first")
A_PATH = Mark("must exist when the run starts")
