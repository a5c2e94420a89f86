"""The server's own options, checked. The engine's are elsewhere; flags are the command line's business."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.errors import InvalidRequestError
from kvboost.models import GenerationMode
from kvboost.settings import choice


@dataclass(frozen=True)
class ApiKey:
    """A key, and the salt that keeps its cached text from that of other keys ("" = shared)."""

    key: str
    salt: str = ""

    def __post_init__(self) -> None:
        if not self.key or not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise InvalidRequestError("an API key must be printable ASCII without spaces, and not empty")

    @classmethod
    def parsed(cls, text: str) -> ApiKey:
        """From KEY or KEY:SALT."""
        key, _, salt = text.partition(":")
        return cls(key, salt)

    def __repr__(self) -> str:
        return f"ApiKey(***, salt={'***' if self.salt else None})"


@dataclass(frozen=True)
class ServerSettings:
    """Options of one server.

    Requests must give `model_name` or one of `aliases` as their model. Without `api_keys` everybody may use
    it; with `admin_key`, routes that concern everybody need that one. Without `api_keys`, requests must be
    for an address, a local name or one of `allowed_hosts` ("*": for any).
    """

    model_name: str = "kvboost"
    aliases: tuple[str, ...] = ()
    mode: GenerationMode | str = GenerationMode.PREFIX_CACHE
    api_keys: tuple[ApiKey, ...] = ()
    admin_key: ApiKey | None = None
    batching: bool = True
    max_rows: int | None = None
    batch_tokens: int | None = None
    max_waiting: int = 128
    timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0
    max_request_bytes: int = 4_000_000
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    log_prompts: bool = False
    default_max_tokens: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", choice(GenerationMode, "mode", self.mode))
        if not self.model_name:
            raise InvalidRequestError("the served model needs a name")
        for name in ("max_rows", "batch_tokens", "max_waiting", "max_request_bytes", "default_max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {value}")
        if self.timeout_s <= 0:
            raise InvalidRequestError(f"timeout_s must be greater than 0, got {self.timeout_s}")
        if self.shutdown_timeout_s < 0:
            raise InvalidRequestError(f"shutdown_timeout_s must be at least 0, got {self.shutdown_timeout_s}")
        keys = [each.key for each in (*self.api_keys, self.admin_key) if each is not None]
        if len(set(keys)) != len(keys):
            raise InvalidRequestError("the same key is given twice")

    @property
    def mode_name(self) -> str:
        return GenerationMode(self.mode).value

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return (self.model_name, *self.aliases)
