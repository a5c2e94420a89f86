"""Locks that a fork leaves usable, and the lock that serializes forwards of models that share something.

A child of `fork` has one thread: a lock that another thread held then would stay held for ever. Those made
here are free again in the child. Knows no model but by its modules and its config.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_made: weakref.WeakSet[Any] = weakref.WeakSet()
_around_data: weakref.WeakSet[Any] = weakref.WeakSet()
_noting = threading.Lock()  # around both
_taken_for_fork: list[Any] = []
_undo_in_child: list[Callable[[], None]] = []
_FORK_WAIT_S = 1.0


def fork_safe_lock(*, around_data: bool = False) -> threading.Lock:
    """A lock that is free in the child of a fork.

    `around_data` says that it is held for moments only: a fork waits for it, so that what it guards is whole.
    """
    return _noted(threading.Lock(), around_data)


def fork_safe_rlock(*, around_data: bool = False) -> threading.RLock:
    """The same, and its holder may take it again."""
    return _noted(threading.RLock(), around_data)


def _noted(lock: T, around_data: bool) -> T:
    with _noting:
        _made.add(lock)
        if around_data:
            _around_data.add(lock)
    return lock


def undo_in_child(undo: Callable[[], None]) -> None:
    """Have `undo` called in the child of every fork, once the locks are free."""
    _undo_in_child.append(undo)


def _before_fork() -> None:
    if _noting.acquire(timeout=_FORK_WAIT_S):  # nobody makes one more until the fork is over
        _taken_for_fork.append(_noting)
    _taken_for_fork.extend(lock for lock in list(_around_data) if lock.acquire(timeout=_FORK_WAIT_S))


def _in_parent() -> None:
    while _taken_for_fork:
        _taken_for_fork.pop().release()


def _in_child() -> None:
    _taken_for_fork.clear()
    _noting._at_fork_reinit()  # type: ignore[attr-defined]
    for lock in list(_made):
        lock._at_fork_reinit()
    for undo in _undo_in_child:
        undo()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


# --- one forward at a time -----------------------------------------------------------------------

_MOMENT_S = 0.05


class ModelLock:
    """Held for forwards: one at a time among all models that share a module or a config."""

    def __init__(self, parts: list[threading.RLock]) -> None:
        self._parts = parts
        self._released_at = -math.inf

    @property
    def is_busy(self) -> bool:
        """Whether somebody else holds it, or did a moment ago: an answer takes it for every token."""
        return self.is_held or time.monotonic() - self._released_at < _MOMENT_S

    @property
    def is_held(self) -> bool:
        """Whether somebody else holds it now."""
        for number, part in enumerate(self._parts):
            if not part.acquire(blocking=False):
                for taken in self._parts[:number]:
                    taken.release()
                return True
        for taken in self._parts:
            taken.release()
        return False

    def __enter__(self) -> ModelLock:
        for part in self._parts:
            part.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self._released_at = time.monotonic()
        for part in reversed(self._parts):
            part.release()


# What models may share, by identity: configs compare by value and have no hash.
_owners: dict[int, tuple[weakref.ref[Any], int, threading.RLock]] = {}
_locks: weakref.WeakKeyDictionary[Any, ModelLock] = weakref.WeakKeyDictionary()
_guard = fork_safe_lock()
_count = 0


def model_lock(model: Any) -> ModelLock:
    """The lock for forwards of `model`, shared by all models with a module or a config in common."""
    with _guard:
        if model not in _locks:
            _locks[model] = _lock_of(model)
        return _locks[model]


def forget_model_lock(model: Any) -> None:
    """Look anew, next time, what `model` shares: its modules have changed."""
    with _guard:
        _locks.pop(model, None)


def _lock_of(model: Any) -> ModelLock:
    """The locks that parts of it have already, in the order of their making; the rest joins the first."""
    global _count  # numbers order the locks: whoever takes several takes them in this order
    parts = _shared_parts(model)
    found = {number: lock for part in parts if (entry := _entry(part)) for _, number, lock in [entry]}
    if not found:
        _count += 1
        found = {_count: fork_safe_rlock()}
    first = min(found)
    for part in parts:
        if _entry(part) is None:
            _owners[id(part)] = weakref.ref(part, _Forget(id(part))), first, found[first]
    return ModelLock([found[number] for number in sorted(found)])


class _Forget:
    """Takes the entry of a part away when the part is gone."""

    def __init__(self, key: int) -> None:
        self._key = key

    def __call__(self, _reference: object) -> None:
        _owners.pop(self._key, None)


def _entry(part: Any) -> tuple[weakref.ref[Any], int, threading.RLock] | None:
    entry = _owners.get(id(part))
    return entry if entry is not None and entry[0]() is part else None


def _shared_parts(model: Any) -> list[Any]:
    parts: list[Any] = list(model.modules())
    for module in list(parts):
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "__weakref__"):
            parts.append(config)
    return parts
