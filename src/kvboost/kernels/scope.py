"""Attention of ours inside a model: the call that transformers makes, and the scope in which we answer it.

transformers looks attention up by the name in the model's config. `forward_scope` puts a name of ours
there and says, in a context variable, which backend answers. Other threads and copies of the model may meet
that name too: outside of a scope it stands for the model's own attention. Knows no cache, no engine and
none of the backends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvboost import locks
from kvboost.compat import attention_function, mask_function, text_config
from kvboost.identity.structure import BORROWED_NAMES, BorrowedName, own_name

NAME = "kvboost_folded"  # of ours in the config of a model whose own attention is sdpa
# Arguments that only some models pass, and that our kernel for GPUs takes: a soft cap, and attention sinks.
SOFTCAP, SINKS = "softcap", "s_aux"
# Arguments that do not change what attention computes.
HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "sliding_window",
        "output_attentions",
        "output_hidden_states",
    }
)


@dataclass(slots=True)
class AttentionCall:
    """The arguments of one call of transformers' attention interface: one layer in one forward.

    `query` is `[batch, heads, n, head_dim]`, `key` and `value` are `[batch, kv_heads, tokens, head_dim]`,
    and `mask`, boolean or additive, is `[batch, 1 or heads, n, tokens]`. `extra` has the arguments that only
    some models pass. Read it, do not write to it: it is not frozen because one is made per layer and step.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float = 0.0
    scaling: float | None = None
    is_causal: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_transformers(
        cls,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **extra: Any,
    ) -> AttentionCall:
        """The call, from arguments in the form in which models pass them."""
        return cls(module, query, key, value, attention_mask, dropout, scaling, is_causal, extra)

    @property
    def is_plain(self) -> bool:
        """Whether it asks for a masked softmax and nothing else, so that a backend may compute it."""
        if self.dropout:
            return False
        extra = self.extra
        return extra.keys() <= HARMLESS or all(
            name in HARMLESS or argument is None for name, argument in extra.items()
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.scaling if self.scaling is not None else self.query.shape[3] ** -0.5


class AttentionBackend(Protocol):
    """Computes the attention of the forwards in a scope."""

    def attend(self, call: AttentionCall, /) -> torch.Tensor:
        """Attention `[batch, n, heads, head_dim]`, as transformers' functions return it."""


@dataclass(frozen=True, slots=True)
class ForwardScope:
    """What holds inside a `forward_scope`: who computes attention, and the name of the model's own."""

    backend: AttentionBackend
    own: str


_SCOPE: ContextVar[ForwardScope | None] = ContextVar("kvboost_forward_scope", default=None)


def heeded(call: AttentionCall, name: str) -> Any:
    """An argument that only some models pass; None where the model's own attention leaves it out.

    Releases of transformers differ: their sdpa function left `softcap` out for years, and refuses it now.
    """
    argument, scope = call.extra.get(name), _SCOPE.get()
    if argument is None or (scope is not None and scope.own == "sdpa" and _is_left_out(name)):
        return None
    return argument


@cache
def _is_left_out(name: str) -> bool:
    """Whether transformers' sdpa function gives the same with such an argument as without it."""
    states = torch.arange(32.0).reshape(1, 1, 4, 8).sin()
    module, function = torch.nn.Module(), attention_function("sdpa")
    argument = torch.ones(1) if name == SINKS else 0.1
    try:
        got = function(module, states, states, states, None, **{name: argument})[0]
    except Exception:  # refused: the model itself cannot run so
        return False
    return torch.equal(got, function(module, states, states, states, None)[0])


def model_attention(call: AttentionCall) -> torch.Tensor:
    """The model's own attention `[batch, n, heads, head_dim]`, for calls that a backend cannot compute."""
    scope = _SCOPE.get()
    own = "eager" if scope is not None and scope.own == "eager" else "sdpa"
    output: torch.Tensor = _own_function(call.module, own)(
        call.module,
        call.query,
        call.key,
        call.value,
        call.mask,
        dropout=call.dropout,
        scaling=call.scaling,
        is_causal=call.is_causal,
        **call.extra,
    )[0]
    return output


def _own_function(module: torch.nn.Module, own: str) -> Callable[..., Any]:
    """The model's own attention function: the eager one of its module's file, or a registered one."""
    if own == "eager":
        eager: Callable[..., Any] | None = getattr(
            sys.modules[type(module).__module__], "eager_attention_forward", None
        )
        if eager is not None:
            return eager
        own = "sdpa"
    function: Callable[..., Any] = attention_function(own)
    return function


def _dispatch(
    module: torch.nn.Module, *args: Any, own: str, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is registered under our names: the scope's backend, or outside of a scope the model's own."""
    scope = _SCOPE.get()
    if scope is None:
        result: tuple[torch.Tensor, torch.Tensor | None] = _own_function(module, own)(module, *args, **kwargs)
        return result
    return scope.backend.attend(AttentionCall.from_transformers(module, *args, **kwargs)), None


# --- the name in the config ----------------------------------------------------------------------


_naming = locks.fork_safe_lock()
_SWITCHED: list[tuple[Any, Any]] = []  # configs that hold our name now, each with the name to restore


def _name_over(own: str) -> BorrowedName:
    """Our name for models whose own implementation is `own`.

    It never contains "flash": transformers treats such names as flash attention.
    """
    with _naming:
        if own not in BORROWED_NAMES:
            number = len(BORROWED_NAMES)
            name = BorrowedName(
                NAME if own == "sdpa" else f"kvboost_{number}_{own if own == 'eager' else 'other'}"
            )
            name.own = own
            AttentionInterface.register(name, partial(_dispatch, own=own))
            AttentionMaskInterface.register(name, mask_function(own))
            BORROWED_NAMES[own] = name
        return BORROWED_NAMES[own]


@contextmanager
def forward_scope(model: Any, backend: AttentionBackend) -> Iterator[None]:
    """Inside, and in this context alone, `backend` computes the model's attention.

    Scopes nest: the innermost one holds. The caller holds the model's lock.
    """
    config = text_config(model)
    before = config._attn_implementation
    own = str(own_name(before))
    entry = (config, before)
    outer = _SCOPE.set(ForwardScope(backend, own))
    _SWITCHED.append(entry)
    try:
        config._attn_implementation = _name_over(own)
        yield
    finally:
        if isinstance(config._attn_implementation, BorrowedName):  # else somebody chose another one meanwhile
            config._attn_implementation = before
        with _naming:
            _SWITCHED[:] = [each for each in _SWITCHED if each is not entry]
        _SCOPE.reset(outer)


def _restore_all() -> None:
    """In the child of a fork no forward is running."""
    for config, before in reversed(_SWITCHED):
        config._attn_implementation = before
    _SWITCHED.clear()


locks.undo_in_child(_restore_all)
