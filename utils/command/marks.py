"""Marks of keys, besides pydantic's types and bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
Fraction = Annotated[float, Field(ge=0, le=1)]


class Keys(BaseModel):
    """The keys of a class: each an attribute with its type, its bounds and, below it, its meaning.

        class Sizes(Keys):
            hidden_size: PositiveInt
            \"""Width of the state of a position\"""

    A class or function whose parameter `keys` has such a type gets them there, checked and frozen.
    """

    model_config = STRICT | ConfigDict(
        frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _suit(cls, values: Any) -> Any:
        """YAML has neither tuples nor 1e3 as a whole number, and reads a name of digits as one."""
        if not isinstance(values, dict):
            return values
        return {key: _suited(value, cls.model_fields.get(key)) for key, value in values.items()}


def _suited(value: Any, field: FieldInfo | None) -> Any:
    kinds = {get_origin(kind) or kind for kind in members(field.annotation)} if field else set()
    if isinstance(value, list) and tuple in kinds:
        return tuple(value)
    if type(value) is float and value.is_integer() and int in kinds and float not in kinds:
        return int(value)
    if type(value) in (int, float) and str in kinds and not kinds & {int, float}:
        return str(value)
    return value


def members(annotation: Any) -> Iterator[Any]:
    """Yields the types of a union, without what annotates them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from members(get_args(annotation)[0])
    elif origin is Union or origin is type(int | str):
        for member in get_args(annotation):
            yield from members(member)
    else:
        yield annotation


@dataclass(frozen=True)
class Mark:
    """What a key means to a run."""

    about: str


SAME_RUN = Mark(
    "does not change what the run is: its derived name stays, and any start may change it"
)
MAY_CHANGE = Mark("changes the derived name, but a run with a given run_name continues with it")
NAMES_PROJECT = Mark("names the project, unless project_name does")
A_RUN = Mark("takes the folder of a run, or the arguments of one, which is then trained first")
A_PATH = Mark("must exist when the run starts")
