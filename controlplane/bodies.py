"""Bodies that clients send. It imports pydantic alone, as `declarations` needs it."""

from typing import Any, Final, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError

FAULTS_MAX = 5000
"""Of a body, for the first of them to be named."""
TOO_MANY_FAULTS: Final = "too_many_faults"
"""Pydantic's type of the error of a body that has more."""


class ClientBody(BaseModel):
    """A body that a client sends. Where it has very many faults, these are only counted: only the first is told anyway,
    and each would be described by a kilobyte.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _few_faults(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(given)
        except ValidationError as error:
            count = error.error_count()
            if count <= FAULTS_MAX:
                raise
            raise PydanticCustomError(TOO_MANY_FAULTS, "the body has {count} faults", {"count": count}) from None
