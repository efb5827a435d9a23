"""The base of every stage's settings."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = ["FrozenModel", "changed", "problem_of"]

M = TypeVar("M", bound=BaseModel)


class FrozenModel(BaseModel):
    """A value: immutable, no unknown keys, finite; fields documented by the string under each."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def problem_of(error: ValidationError, *, whole: str = "") -> str:
    """Return the first problem of a file that holds no such value: where and what.

    Args:
        error: What reading it raised.
        whole: Stands for the place where the file as a whole is meant.
    """
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or whole}: {problem['msg']}"


def changed(model: M, fields: Mapping[str, Any]) -> M:
    """Return the model with other values of some fields, checked as those of a new one are.

    Raises:
        pydantic.ValidationError: There is no such field, or a value does not fit.
    """
    values = {name: getattr(model, name) for name in type(model).model_fields}
    return type(model).model_validate({**values, **fields})
