"""Rules on the types of request fields that say in our own words what a field takes.

They stand in `Annotated` and change no value. Each replaces the validator's errors by one of its own:
`expected` (what the field must be) or `unsupported` (why there is no such thing here). How an error is sent
is `errors`' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

EXPECTED, UNSUPPORTED, TOO_MANY = "expected", "unsupported", "too_many"
_LISTED = 100  # errors within a field that are kept: a body can have hundreds of thousands


@dataclass(frozen=True)
class Expected:
    """A field that `must be` something, as for `a whole number`. A refusal within it is told instead."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return self.around(handler(source))

    def around(self, schema: CoreSchema) -> CoreSchema:
        def check(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            try:
                return inner(value)
            except ValidationError as error:
                if error.error_count() <= _LISTED:
                    for each in error.errors(include_url=False, include_input=False):
                        if each["type"] == UNSUPPORTED:
                            raise _unsupported(each["ctx"]["reason"]) from None
                raise PydanticCustomError(EXPECTED, "must be {expected}", {"expected": self.words}) from None

        return core_schema.no_info_wrap_validator_function(check, schema)


@dataclass(frozen=True)
class Between:
    """A number from `low` to `high`, both included; None = no bound."""

    low: int
    high: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = "a whole number" if source is int else "a number"
        bounds = f"of at least {self.low}" if self.high is None else f"between {self.low} and {self.high}"
        bounded = handler(Annotated[source, Field(ge=self.low, le=self.high)])
        return Expected(f"{number} {bounds}").around(bounded)


@dataclass(frozen=True)
class Refused:
    """A field of OpenAI's that this server does not have, and what is said of values that ask for it.

    The type beside it names the values that change nothing. With `only`, this is said of these values alone.
    """

    reason: str
    only: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            try:
                return inner(value)
            except ValidationError:
                if self.only and value not in self.only:
                    raise
                raise _unsupported(self.reason) from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler(schema)
        return described if self.only else {**described, "description": f"No other value: {self.reason}."}


def _unsupported(reason: str) -> PydanticCustomError:
    return PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": reason})
