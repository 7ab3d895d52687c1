"""What all tables of a scenario are made of."""

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1e15)]
"""With a limit, so that shares can be added up."""
Count = Annotated[int, Field(ge=1)]

ONE, TABLE = "the same everywhere", "by GPU type"
FORMS = {ONE, TABLE}
"""How a value is given. Errors have it in their place, where the file has no key."""


def _form(value: Any) -> str:
    return TABLE if isinstance(value, dict) else ONE


V = TypeVar("V")
ByGpuType = Annotated[
    Annotated[V, Tag(ONE)] | Annotated[dict[str, V], Tag(TABLE), Field(min_length=1)], Discriminator(_form)
]
"""A value for all GPU types, or a table of them."""


def by_gpu_type(value: V | dict[str, V], gpu_types: Iterable[str]) -> dict[str, V]:
    """The table; a value for all is that of each of `gpu_types`."""
    return value if isinstance(value, dict) else dict.fromkeys(gpu_types, value)


class Part(BaseModel):
    """A table of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
