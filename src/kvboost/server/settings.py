"""The server's own options, checked. The engine's are elsewhere; flags are the command line's business."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.errors import InvalidRequestError
from kvboost.models import GenerationMode
from kvboost.server.schemas import MAX_MESSAGES
from kvboost.settings import choice

_COUNTS = (
    "max_rows",
    "batch_tokens",
    "max_waiting",
    "max_waiting_per_tenant",
    "max_request_bytes",
    "max_messages",
    "max_prompt_characters",
    "default_max_tokens",
)


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

    A key is a tenant; without keys, an address is. `max_waiting_per_tenant` is half of `max_waiting` by
    default, or all of it where there is one key only. `max_prompt_characters` is 16 for every token that
    fits by default. A stream that has nothing to say sends a comment every `keep_alive_s`.
    """

    model_name: str = "kvboost"
    aliases: tuple[str, ...] = ()
    mode: GenerationMode | str = GenerationMode.PREFIX_CACHE
    api_keys: tuple[ApiKey, ...] = ()
    admin_key: ApiKey | None = None
    batching: bool = True
    max_rows: int | None = None
    batch_tokens: int | None = None
    max_waiting: int = 256
    max_waiting_per_tenant: int | None = None
    timeout_s: float = 600.0
    read_timeout_s: float = 30.0
    keep_alive_s: float = 10.0
    shutdown_timeout_s: float = 30.0
    max_request_bytes: int = 4_000_000
    max_messages: int = 4_096
    max_prompt_characters: int | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    log_prompts: bool = False
    default_max_tokens: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", choice(GenerationMode, "mode", self.mode))
        if not self.model_name:
            raise InvalidRequestError("the served model needs a name")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {value}")
        if self.max_messages > MAX_MESSAGES:
            raise InvalidRequestError(f"max_messages can be at most {MAX_MESSAGES}, got {self.max_messages}")
        for name in ("timeout_s", "read_timeout_s", "keep_alive_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequestError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if self.shutdown_timeout_s < 0:
            raise InvalidRequestError(f"shutdown_timeout_s must be at least 0, got {self.shutdown_timeout_s}")
        keys = [each.key for each in (*self.api_keys, self.admin_key) if each is not None]
        if len(set(keys)) != len(keys):
            raise InvalidRequestError("the same key is given twice")

    @property
    def mode_name(self) -> str:
        return GenerationMode(self.mode).value

    @property
    def has_tenants(self) -> bool:
        """Whether several keys share the server."""
        return len(self.api_keys) + (self.admin_key is not None) > 1

    @property
    def share_of_the_queue(self) -> int:
        """Requests of one tenant that may wait."""
        if self.max_waiting_per_tenant is not None:
            return min(self.max_waiting_per_tenant, self.max_waiting)
        is_only_one = len(self.api_keys) == 1 and not self.has_tenants
        return self.max_waiting if is_only_one else max(1, self.max_waiting // 2)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return (self.model_name, *self.aliases)
