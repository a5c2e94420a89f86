"""What running a batch needs of an engine: its model, its cache, and what the model is right now.

Names only; the executor's parts fulfil it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvboost.identity.namespace import Namespace
from kvboost.kv.layout import KVLayout
from kvboost.requests.prompts import PromptReader
from kvboost.requests.request import Request
from kvboost.reuse.chunk_loader import ChunkLoader
from kvboost.reuse.plan import ReusePlan
from kvboost.reuse.recorder import Recorder
from kvboost.reuse.workspace import Workspace
from kvboost.store.manager import KVCacheManager


class ModelState(Protocol):
    """Sees whether the model has changed since a request began."""

    def begin(self, requests: Sequence[Request]) -> None:
        """Read the model's state, and give the requests the namespace that belongs to it."""

    def is_current(self, namespace: Namespace) -> bool:
        """Whether the model is still what it was when `namespace` was read."""


class BatchContext(Protocol):
    """The parts of an engine that batches run on."""

    model: Any
    tokenizer: Any
    layout: KVLayout
    manager: KVCacheManager
    loader: ChunkLoader
    recorder: Recorder
    workspace: Workspace
    reader: PromptReader

    @property
    def fit(self) -> ModelState:
        """What the model is now."""

    def plan(self, request: Request) -> ReusePlan:
        """What the cache holds of the prompt, to look at."""

    def planned(self, request: Request) -> AbstractContextManager[ReusePlan]:
        """What the cache holds of the prompt, kept there until the block ends."""
