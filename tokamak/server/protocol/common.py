"""What holds for every request body? Unknown names, wrong types and long lists are refused in one way.

Requests are pydantic models, which say what is wrong with a field.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""An integer that fits in what the engine is told."""

T = TypeVar("T")


class AtFirstWrong(FailFast):
    """Pydantic's mark for lists that are refused at their first wrong item, to be used in unions."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Items = Annotated[list[T], AtFirstWrong()]
"""A list that is refused at its first wrong item: one error is enough, and a million cost a minute."""


class Body(BaseModel):
    """A request body: unknown fields, numbers as strings, NaN and Infinity are refused."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        frozen=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _know_all_names(cls, data: object) -> object:
        """Refuse a body at its first unknown name."""
        if isinstance(data, dict):
            data = cast("dict[str, object]", data)
            for name in data:
                if name not in known_names(cls):
                    raise PydanticCustomError("unknown_name", "unknown", {"name": name})
        return data


@cache
def known_names(model: type[Body]) -> frozenset[str]:
    """The names a body has, as clients write them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())
