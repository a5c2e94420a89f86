"""kvboost: reuse the KV tensors of text that a Hugging Face model has already read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost.batching.prefixes import broadcast_kv, find_common_chunk_prefix, group_by_prefix
    from kvboost.choices import AssemblyMode, ChunkStrategy, GenerationMode, RecomputeStrategy
    from kvboost.compat import (
        SUPPORTED_ARCHITECTURES,
        UNSUPPORTED_ARCHITECTURES,
        check_model_compatibility,
    )
    from kvboost.disk.tier import DiskTier
    from kvboost.engine import InferenceEngine, KVBoost
    from kvboost.errors import ApproximateReuseWarning
    from kvboost.kv.quantize import QuantizedKV, dequantize_kv, quantize_kv
    from kvboost.models import (
        AssembledPrompt,
        CachedChunk,
        GenerationResult,
        WarmResult,
        chained_hash,
        content_hash_from_tokens,
    )
    from kvboost.proof.verify import CorrectnessReport
    from kvboost.reuse.assembler import PromptAssembler
    from kvboost.reuse.strategies.cacheblend import CacheBlendRecompute
    from kvboost.reuse.strategies.selective import SelectiveRecompute
    from kvboost.store.chunking import ChunkRegistry
    from kvboost.store.manager import KVCacheManager

__version__ = "0.1.0"

# Where each public name lives. They are imported on first use, so that `import kvboost` and
# `kvboost --help` do not wait for torch and transformers.
_HOMES = {
    "SUPPORTED_ARCHITECTURES": "compat",
    "UNSUPPORTED_ARCHITECTURES": "compat",
    "ApproximateReuseWarning": "errors",
    "AssembledPrompt": "models",
    "AssemblyMode": "choices",
    "CacheBlendRecompute": "cacheblend",
    "CachedChunk": "models",
    "ChunkRegistry": "chunk_registry",
    "ChunkStrategy": "choices",
    "CorrectnessReport": "proof.verify",
    "DiskTier": "disk_tier",
    "GenerationMode": "choices",
    "GenerationResult": "models",
    "InferenceEngine": "engine",
    "KVBoost": "engine",
    "KVCacheManager": "cache_manager",
    "PromptAssembler": "prompt_assembler",
    "QuantizedKV": "kv_quantize",
    "RecomputeStrategy": "choices",
    "SelectiveRecompute": "selective_recompute",
    "WarmResult": "models",
    "broadcast_kv": "batch",
    "chained_hash": "models",
    "check_model_compatibility": "compat",
    "content_hash_from_tokens": "models",
    "dequantize_kv": "kv_quantize",
    "find_common_chunk_prefix": "batch",
    "group_by_prefix": "batch",
    "quantize_kv": "kv_quantize",
}

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "UNSUPPORTED_ARCHITECTURES",
    "ApproximateReuseWarning",
    "AssembledPrompt",
    "AssemblyMode",
    "CacheBlendRecompute",
    "CachedChunk",
    "ChunkRegistry",
    "ChunkStrategy",
    "CorrectnessReport",
    "DiskTier",
    "GenerationMode",
    "GenerationResult",
    "InferenceEngine",
    "KVBoost",
    "KVCacheManager",
    "PromptAssembler",
    "QuantizedKV",
    "RecomputeStrategy",
    "SelectiveRecompute",
    "WarmResult",
    "__version__",
    "broadcast_kv",
    "chained_hash",
    "check_model_compatibility",
    "content_hash_from_tokens",
    "dequantize_kv",
    "find_common_chunk_prefix",
    "group_by_prefix",
    "quantize_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvboost' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kvboost.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
