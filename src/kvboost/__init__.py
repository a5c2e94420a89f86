"""kvboost: reuse the KV tensors of text that a Hugging Face model has already read."""

from kvboost.cache_manager import KVCacheManager
from kvboost.chunk_registry import ChunkRegistry
from kvboost.compat import (
    SUPPORTED_ARCHITECTURES,
    UNSUPPORTED_ARCHITECTURES,
    check_model_compatibility,
)
from kvboost.engine import InferenceEngine, KVBoost
from kvboost.models import (
    AssembledPrompt,
    AssemblyMode,
    CachedChunk,
    ChunkStrategy,
    GenerationMode,
    GenerationResult,
    RecomputeStrategy,
    WarmResult,
    chained_hash,
    content_hash_from_tokens,
)
from kvboost.prompt_assembler import PromptAssembler

__version__ = "0.1.0"

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "UNSUPPORTED_ARCHITECTURES",
    "AssembledPrompt",
    "AssemblyMode",
    "CachedChunk",
    "ChunkRegistry",
    "ChunkStrategy",
    "GenerationMode",
    "GenerationResult",
    "InferenceEngine",
    "KVBoost",
    "KVCacheManager",
    "PromptAssembler",
    "RecomputeStrategy",
    "WarmResult",
    "__version__",
    "chained_hash",
    "check_model_compatibility",
    "content_hash_from_tokens",
]
