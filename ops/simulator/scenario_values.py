"""What all tables of a scenario are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1e15)]
"""With a limit, so that shares can be added up."""
Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    """A table of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
