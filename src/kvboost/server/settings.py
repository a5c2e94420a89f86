"""The server's own options, each declared once, and checked. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvboost.choices import GenerationMode, choice
from kvboost.errors import InvalidRequestError
from kvboost.settings import Kind, about, options_of

MODES = ("prefix_cache", "chunk_kv_reuse", "baseline")  # the default first
MAX_MESSAGES = 16_384  # of one request, whatever the settings say


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


def _option(default: Any, says: str, kind: Kind, **more: Any) -> Any:
    """A field that is an option of `kvboost serve`."""
    return field(default=default, metadata=about("serving", says, kind, **more))


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
    mode: GenerationMode | str = _option(  # noqa: RUF009  # it makes a field
        MODES[0],
        "What is reused: exact prefixes, moved text too (approximately), or nothing. The last is "
        "not batched.",
        "choice",
        choices=MODES,
    )
    api_keys: tuple[ApiKey, ...] = ()
    admin_key: ApiKey | None = None
    batching: bool = _option(True, "Many requests at once, or one by one.", "switch")
    max_sequences: int | None = _option(
        None, "Requests in the running batch.", "count", least=1, default_text="32, on a GPU 64"
    )
    batch_tokens: int | None = _option(
        None,
        "Tokens whose KV the running batch can hold; a request that needs more gets a 400.",
        "count",
        least=1,
        default_text="65536, or as memory allows",
    )
    max_waiting: int = _option(256, "Requests that may wait; more get a 429.", "count", least=1)
    max_waiting_per_tenant: int | None = _option(
        None,
        "Requests of one key that may wait; without keys, of one address. A single key may have all.",
        "count",
        least=1,
        flag="--max-waiting-per-key",
        default_text="half of --max-waiting",
    )
    timeout_s: float = _option(
        600.0, "Time that a request may take, waiting included.", "seconds", flag="--timeout"
    )
    read_timeout_s: float = _option(
        30.0, "Time for a request to arrive and to be tokenized.", "seconds", flag="--read-timeout"
    )
    keep_alive_s: float = _option(
        10.0, "A stream with nothing to say sends a comment after this time.", "seconds", flag="--keep-alive"
    )
    shutdown_timeout_s: float = _option(
        30.0,
        "Time for running requests after SIGTERM or Ctrl-C.",
        "seconds",
        least=0,
        flag="--shutdown-timeout",
    )
    max_request_bytes: int = _option(
        4_000_000, "Longest body of a request, such as 512KiB.", "size", least=1, default_text="4MB"
    )
    max_messages: int = _option(
        4_096,
        "Messages of one chat, with the parts of all of them; at most 16384.",
        "count",
        least=1,
        most=MAX_MESSAGES,
    )
    max_prompt_characters: int | None = _option(
        None, "Characters of one prompt.", "count", least=1, default_text="16 for every token that fits"
    )
    cors_origins: tuple[str, ...] = _option(
        (),
        "Web pages from this origin may call the server; can be repeated.",
        "several texts",
        flag="--cors",
        metavar="ORIGIN",
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        "A name of this server beside addresses and local names, * = any; needed only without keys. "
        "Can be repeated.",
        "several texts",
        flag="--allowed-host",
        metavar="NAME",
    )
    log_prompts: bool = _option(
        False, "Write prompts and answers to the log, and show texts of chunks in the stats.", "switch"
    )
    default_max_tokens: int = _option(512, "Longest answer where a request does not say.", "count", least=1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", choice(GenerationMode, "mode", self.mode))
        if not self.model_name:
            raise InvalidRequestError("the served model needs a name")
        for each in options_of(ServerSettings):
            value = getattr(self, each.name)
            if value is None or each.kind not in ("count", "size", "seconds"):
                continue
            if each.least is None and not value > 0:
                raise InvalidRequestError(f"{each.name} must be greater than 0, got {value}")
            if each.least is not None and value < each.least:
                raise InvalidRequestError(f"{each.name} must be at least {each.least}, got {value}")
            if each.most is not None and value > each.most:
                raise InvalidRequestError(f"{each.name} can be at most {each.most}, got {value}")
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
