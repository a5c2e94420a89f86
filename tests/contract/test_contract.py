"""The public contract, line by line: names, homes, parameters, defaults, values.

What the contract promises and the package does not have yet stands in `NOT_YET`, and is checked
to be absent: whoever adds it has to take it off that list, and then its signature is checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

import kvboost
from kvboost import models
from kvboost.engine import InferenceEngine
from kvboost.errors import InvalidRequestError

NOT_YET: frozenset[str] = frozenset()

REQUIRED = inspect.Parameter.empty
Parameters = dict[str, Any]

# --- what the contract says ------------------------------------------------------------------

EXPORTS = {  # top-level name -> its real home
    "KVBoost": "kvboost.engine",
    "GenerationMode": "kvboost.models",
    "GenerationResult": "kvboost.models",
    "RecomputeStrategy": "kvboost.models",
    "CachedChunk": "kvboost.models",
    "AssembledPrompt": "kvboost.models",
    "WarmResult": "kvboost.models",
    "CorrectnessReport": None,
    "content_hash_from_tokens": "kvboost.models",
    "chained_hash": "kvboost.models",
    "KVCacheManager": "kvboost.cache_manager",
    "ChunkRegistry": "kvboost.chunk_registry",
    "ChunkStrategy": "kvboost.models",
    "PromptAssembler": "kvboost.prompt_assembler",
    "AssemblyMode": "kvboost.models",
    "SelectiveRecompute": "kvboost.selective_recompute",
    "CacheBlendRecompute": "kvboost.cacheblend",
    "quantize_kv": "kvboost.kv_quantize",
    "dequantize_kv": "kvboost.kv_quantize",
    "QuantizedKV": "kvboost.kv_quantize",
    "DiskTier": "kvboost.disk_tier",
    "find_common_chunk_prefix": "kvboost.batch",
    "broadcast_kv": "kvboost.batch",
    "group_by_prefix": "kvboost.batch",
    "check_model_compatibility": "kvboost.compat",
    "SUPPORTED_ARCHITECTURES": "kvboost.compat",
    "UNSUPPORTED_ARCHITECTURES": "kvboost.compat",
    "__version__": "kvboost",
}

MODULES = (
    "kvboost.models",
    "kvboost.engine",
    "kvboost.cache_manager",
    "kvboost.prompt_assembler",
    "kvboost.chunk_registry",
    "kvboost.selective_recompute",
    "kvboost.cacheblend",
    "kvboost.kv_quantize",
    "kvboost.disk_tier",
    "kvboost.batch",
    "kvboost.compat",
    "kvboost.server",
)

CONSTRUCTOR: Parameters = {
    "model": REQUIRED,
    "tokenizer": REQUIRED,
    "chunk_size": 128,
    "max_chunks": 128,
    "recompute_overlap": 16,
    "recompute_strategy": models.RecomputeStrategy.SELECTIVE,
    "recompute_ratio": 0.15,
    "kv_cache_bits": 16,
    "disk_cache_dir": None,
    "device": None,
}

OPTIONS: Parameters = {  # keyword-only parameters of the constructor
    "chunk_boundary_window": 0,
    "overlap_k": 0,
    "sink_tokens": 0,
    "max_cache_bytes": None,
    "disk_cache_bytes": None,
    "remote_cache": None,
    "remote_write": "all",
    "cache_device": "cpu",
    "gpu_cache_bytes": None,
    "selector": "guided",
    "max_kl": None,
    "bit_exact": False,
    "cache_salt": "",
    "prefill_block": None,
    "pack_weights": None,
    "weights_check_seconds": 60.0,
}

VALUES: tuple[tuple[str, Any], ...] = (  # values that the constructor takes
    ("kv_cache_bits", 16),
    ("kv_cache_bits", 8),
    ("kv_cache_bits", 4),
    ("kv_cache_bits", "k8v4"),
    ("kv_cache_bits", None),
    ("recompute_ratio", 0.5),
    ("recompute_ratio", "auto"),
    ("max_chunks", None),
    ("disk_cache_dir", "folder"),
    ("remote_write", "all"),
    ("remote_write", "reused"),
    ("recompute_strategy", "selective"),
    ("recompute_strategy", "cacheblend"),
    ("recompute_strategy", "none"),
    ("recompute_strategy", models.RecomputeStrategy.NONE),
    ("cache_device", "model"),
    ("gpu_cache_bytes", 0),
    ("prefill_block", 16),
    ("pack_weights", False),
    ("weights_check_seconds", None),
    ("bit_exact", True),
    ("device", "cpu"),
)

METHODS: dict[str, Parameters] = {
    "from_pretrained": {"model_name": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "strict": True},
    "generate": {
        "prompt": REQUIRED,
        "max_new_tokens": 64,
        "mode": models.GenerationMode.CHUNK_KV_REUSE,
        "temperature": 1.0,
        "do_sample": False,
    },
    "generate_batch": {
        "prompts": REQUIRED,
        "max_new_tokens": 64,
        "temperature": 1.0,
        "do_sample": False,
    },
    "generate_many": {
        "prompts": REQUIRED,
        "max_new_tokens": 64,
        "temperature": 1.0,
        "do_sample": False,
    },
    "warm": {"text": REQUIRED, "position_offset": 0},
    "warm_documents": {"texts": REQUIRED, "behind": None},
    "cache_stats": {},
    "weights_changed": {},
    "verify_correctness": {"prompts": None, "max_new_tokens": 32},
    "evaluate": {"questions": REQUIRED},
    "explain": {"prompt": REQUIRED},
    "stream": {"prompt": REQUIRED},
    "pin": {"text": REQUIRED},
    "unpin": {"text": REQUIRED},
    "score": {"prompts": REQUIRED, "continuations": REQUIRED},
    "prepare": {"prompt": REQUIRED},
    "commit": {"prepared": REQUIRED, "output_ids": REQUIRED},
    "save": {"path": REQUIRED},
    "load": {"path": REQUIRED},
    "clear": {},
    "close": {},
    "__enter__": {},
}

KEYWORDS: dict[str, Parameters] = {  # keyword-only parameters of methods, with their defaults
    "generate": {"cache_salt": None, "seed": None, "recompute_ratio": None, "selector": None},
    "generate_batch": {
        "mode": models.GenerationMode.PREFIX_CACHE,
        "recompute_ratio": None,
        "selector": None,
    },
    "generate_many": {
        "mode": models.GenerationMode.PREFIX_CACHE,
        "recompute_ratio": None,
        "selector": None,
    },
    "evaluate": {
        "modes": ("baseline", "prefix_cache", "chunk_kv_reuse"),
        "ratios": (0.10, 0.15, 0.30),
        "max_new_tokens": 32,
        "read": "alone",
        "results": None,
        "progress": None,
    },
    "score": {"mode": models.GenerationMode.PREFIX_CACHE, "recompute_ratio": None, "selector": None},
}

SIGNATURES: dict[str, Parameters] = {
    "kvboost.models.content_hash_from_tokens": {"token_ids": REQUIRED},
    "kvboost.models.chained_hash": {"token_ids": REQUIRED, "parent_hash": None},
    "kvboost.cache_manager.KVCacheManager.store": {"chunk": REQUIRED},
    "kvboost.cache_manager.KVCacheManager.get": {"key": REQUIRED},
    "kvboost.cache_manager.KVCacheManager.find_matching_chunks": {"token_ids": REQUIRED},
    "kvboost.cache_manager.KVCacheManager.stats": {},
    "kvboost.prompt_assembler.PromptAssembler.assemble": {"token_ids": REQUIRED},
    "kvboost.chunk_registry.ChunkRegistry": {
        "chunk_size": 128,
        "strategy": models.ChunkStrategy.FIXED,
        "min_chunk_tokens": 32,
    },
    "kvboost.chunk_registry.ChunkRegistry.split": {
        "token_ids": REQUIRED,
        "text": "",
        "boundary_tokens": None,
    },
    "kvboost.compat.check_model_compatibility": {"model": REQUIRED, "strict": True},
    "kvboost.selective_recompute.SelectiveRecompute": {
        "recompute_overlap": 16,
        "skip_if_no_seams": True,
        "device": "cpu",
    },
    "kvboost.selective_recompute.SelectiveRecompute.apply": {"assembled": REQUIRED, "model": REQUIRED},
    "kvboost.cacheblend.CacheBlendRecompute": {
        "recompute_ratio": 0.15,
        "min_deviation": 0.01,
        "device": "cpu",
    },
    "kvboost.cacheblend.CacheBlendRecompute.apply": {"assembled": REQUIRED, "model": REQUIRED},
    "kvboost.kv_quantize.quantize_kv": {"kv": REQUIRED, "bits": 8},
    "kvboost.kv_quantize.dequantize_kv": {"qkv": REQUIRED},
    "kvboost.kv_quantize.QuantizedKV": {
        "layers": REQUIRED,
        "bits": REQUIRED,
        "original_dtype": REQUIRED,
    },
    "kvboost.disk_tier.DiskTier": {"cache_dir": REQUIRED, "max_chunks": 256, "slot_bytes": 10_485_760},
    "kvboost.disk_tier.DiskTier.write": {"chunk": REQUIRED},
    "kvboost.disk_tier.DiskTier.read": {"chunk_hash": REQUIRED, "device": "cpu"},
    "kvboost.batch.find_common_chunk_prefix": {"all_token_ids": REQUIRED, "chunk_size": REQUIRED},
    "kvboost.batch.broadcast_kv": {"kv": REQUIRED, "batch_size": REQUIRED},
    "kvboost.batch.group_by_prefix": {
        "prompts": REQUIRED,
        "token_ids_list": REQUIRED,
        "chunk_size": REQUIRED,
        "n_prefix_chunks": 3,
    },
}

ENUMS: dict[str, dict[str, str]] = {
    "GenerationMode": {
        "BASELINE": "baseline",
        "PREFIX_CACHE": "prefix_cache",
        "CHUNK_KV_REUSE": "chunk_kv_reuse",
    },
    "RecomputeStrategy": {"SELECTIVE": "selective", "CACHEBLEND": "cacheblend", "NONE": "none"},
    "AssemblyMode": {"PREFIX_ONLY": "prefix_only", "CHUNK_REUSE": "chunk_reuse"},
    "ChunkStrategy": {"FIXED": "fixed", "SEMANTIC": "semantic", "DOCUMENT": "document"},
}

FIELDS: dict[str, Parameters] = {  # fields of dataclasses in their order
    "CachedChunk": {
        "chunk_id": REQUIRED,
        "text": REQUIRED,
        "token_ids": REQUIRED,
        "past_key_values": REQUIRED,
        "position_start": REQUIRED,
        "position_end": REQUIRED,
        "prefix_hash": "",
        "content_hash": "",
        "created_at": ...,
        "access_count": 0,
        "recomputed": False,
    },
    "AssembledPrompt": {
        "full_token_ids": REQUIRED,
        "cached_past_kv": REQUIRED,
        "cached_length": REQUIRED,
        "live_token_ids": REQUIRED,
        "live_position_ids": REQUIRED,
        "chunk_boundaries": REQUIRED,
        "cache_hit_ratio": REQUIRED,
        "has_approximate": False,
        "runs": (),
    },
    "WarmResult": {
        "chunks_stored": REQUIRED,
        "token_count": REQUIRED,
        "chunk_size": REQUIRED,
        "chunk_boundary_aligned": REQUIRED,
        "partial_tail_tokens": REQUIRED,
        "alignment_warning": None,
    },
    "GenerationResult": {
        "mode": REQUIRED,
        "prompt": REQUIRED,
        "output_text": REQUIRED,
        "generated_tokens": REQUIRED,
        "ttft_ms": REQUIRED,
        "total_ms": REQUIRED,
        "tokens_per_sec": REQUIRED,
        "kv_reuse_ratio": REQUIRED,
        "prompt_tokens": REQUIRED,
        "cached_tokens": REQUIRED,
    },
}

SUPPORTED = [
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen2_5",
    "Phi",
    "Phi3",
    "Gemma",
    "Gemma2",
    "StableLm",
    "InternLM",
    "InternLM2",
    "Qwen3",
    "SmolLM3",
    "Olmo2",
    "Granite",
]

UNSUPPORTED = {  # name -> a word of its reason
    "BloomForCausalLM": "ALiBi",
    "FalconForCausalLM": "ALiBi",
    "MPTForCausalLM": "ALiBi",
    "MptForCausalLM": "ALiBi",
    "GPT2LMHeadModel": "learned absolute positions",
    "GPTNeoForCausalLM": "learned absolute positions",
    "GPTNeoXForCausalLM": "position ids may not be honoured",
}

COMMANDS = [
    "demo",
    "generate",
    "warm",
    "verify",
    "explain",
    "calibrate",
    "evaluate",
    "bench",
    "stats",
    "disk",
    "remote",
    "serve",
]
FLAGS = [
    "--chunk-size",
    "--chunk-boundary-window",
    "--overlap-k",
    "--sink-tokens",
    "--recompute-strategy",
    "--recompute-ratio",
    "--kv-cache-bits",
    "--disk-cache-dir",
    "--remote-cache",
    "--remote-write",
    "--max-cache-bytes",
    "--device",
    "--dtype",
]


# --- names -----------------------------------------------------------------------------------


def value_label(name: str, value: Any) -> str:
    return f"value {name}={value!r}"


def promised() -> Iterator[str]:
    """Everything that `NOT_YET` could name."""
    yield from (f"module {name}" for name in MODULES)
    yield from (f"export {name}" for name in EXPORTS)
    yield from (f"method {name}" for name in METHODS)
    yield from (f"option {name}" for name in OPTIONS)
    yield from (value_label(*pair) for pair in VALUES)
    yield from (f"command {name}" for name in COMMANDS)
    yield from (f"flag {name}" for name in FLAGS)


def test_the_list_of_missing_things_names_only_promised_things() -> None:
    assert set(promised()) >= NOT_YET


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    exists = importlib.util.find_spec(name) is not None
    assert exists == (f"module {name}" not in NOT_YET)
    if exists:
        importlib.import_module(name)


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_and_their_homes(name: str) -> None:
    exists = hasattr(kvboost, name)
    assert exists == (f"export {name}" not in NOT_YET)
    if exists:
        assert name in kvboost.__all__
        home = EXPORTS[name]
        if home is not None:
            assert getattr(importlib.import_module(home), name) is getattr(kvboost, name)


def test_the_public_names_are_sorted_and_there() -> None:
    def as_listed(name: str) -> tuple[int, str]:
        """Constants, then classes, then the rest, each in order."""
        kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
        return kind, name

    assert kvboost.__all__ == sorted(kvboost.__all__, key=as_listed)
    assert len(set(kvboost.__all__)) == len(kvboost.__all__)
    assert all(hasattr(kvboost, name) for name in kvboost.__all__)


def test_kvboost_is_the_engine() -> None:
    assert kvboost.KVBoost is InferenceEngine
    assert importlib.import_module("kvboost.engine").KVBoost is InferenceEngine


def test_the_version_is_that_of_the_distribution() -> None:
    assert kvboost.__version__ == importlib.metadata.version("kvboost")


def test_enums_are_importable_from_the_modules_that_use_them() -> None:
    for home, names in {
        "kvboost.engine": ("GenerationMode", "GenerationResult", "RecomputeStrategy", "WarmResult"),
        "kvboost.prompt_assembler": ("AssemblyMode", "AssembledPrompt"),
        "kvboost.chunk_registry": ("ChunkStrategy",),
        "kvboost.cache_manager": ("CachedChunk",),
    }.items():
        for name in names:
            assert getattr(importlib.import_module(home), name) is getattr(models, name)


def test_importing_kvboost_imports_nothing_optional() -> None:
    code = (
        "import sys, kvboost; "
        "print(*[n for n in ('click', 'rich', 'fastapi', 'uvicorn', 'starlette', 'gguf', 'kvboost.cli', "
        "'kvboost.server', 'kvboost.bench') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []


def test_versions_that_are_promised() -> None:
    metadata = importlib.metadata.metadata("kvboost")
    assert "3.10" in SpecifierSet(metadata["Requires-Python"])
    assert "3.9" not in SpecifierSet(metadata["Requires-Python"])
    needed = [line for line in metadata.get_all("Requires-Dist") or [] if line.startswith("transformers")]
    assert len(needed) == 1
    versions = SpecifierSet(needed[0].removeprefix("transformers"))
    assert "4.57.0" in versions
    assert "5.17.0" in versions
    assert "4.56.2" not in versions


# --- signatures ------------------------------------------------------------------------------


def check_signature(function: Callable[..., Any], wanted: Parameters, keywords: Parameters) -> None:
    """The wanted parameters in their order; anything further has a default."""
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    positional = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional][: len(wanted)] == list(wanted)
    assert {p.name: p.default for p in positional[: len(wanted)]} == wanted
    assert not [p.name for p in positional[len(wanted) :] if p.default is REQUIRED]
    by_name = {p.name: p for p in found if p.kind is p.KEYWORD_ONLY}
    assert not [name for name, p in by_name.items() if p.default is REQUIRED]
    for name, default in keywords.items():
        assert by_name[name].default == default


def test_the_constructor_takes_what_it_always_took_in_the_same_order() -> None:
    found = list(inspect.signature(InferenceEngine).parameters.values())
    positional = {p.name: p.default for p in found if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional) == list(CONSTRUCTOR)
    assert positional == CONSTRUCTOR
    assert not [p.name for p in found if p.kind is p.KEYWORD_ONLY and p.default is REQUIRED]
    assert not [p.name for p in found if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)], "a typo must not pass"


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_constructor(name: str) -> None:
    parameter = inspect.signature(InferenceEngine).parameters.get(name)
    assert (parameter is not None) == (f"option {name}" not in NOT_YET)
    if parameter is not None:
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default == OPTIONS[name]


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_the_engine(name: str) -> None:
    method = getattr(InferenceEngine, name, None)
    assert (method is not None) == (f"method {name}" not in NOT_YET)
    if method is not None:
        check_signature(method, METHODS[name], KEYWORDS.get(name, {}))


@pytest.mark.parametrize("name", ["generate", "from_pretrained"])
def test_further_options_are_taken_by_name(name: str) -> None:
    kinds = [p.kind for p in inspect.signature(getattr(InferenceEngine, name)).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    home, *names = path.split(".", 2)[:1] + path.split(".")[2:]
    module_name = ".".join(path.split(".")[:2])
    if f"module {module_name}" in NOT_YET:
        assert importlib.util.find_spec(module_name) is None
        return
    target: Any = importlib.import_module(module_name)
    for name in names:
        target = getattr(target, name)
    assert home == "kvboost"
    check_signature(target, SIGNATURES[path], {})


def test_further_keywords() -> None:
    registry = inspect.signature(kvboost.ChunkRegistry).parameters["boundary_window"]
    assert (registry.kind, registry.default) == (registry.KEYWORD_ONLY, 0)
    for name in ("pin", "unpin"):
        assert callable(getattr(kvboost.KVCacheManager, name))


# --- enums, dataclasses, hashes --------------------------------------------------------------


@pytest.mark.parametrize("name", ENUMS)
def test_enums(name: str) -> None:
    kind: type[Enum] = getattr(models, name)
    assert {member.name: member.value for member in kind} == ENUMS[name]
    for member in kind:
        assert kind(member.value) is member


@pytest.mark.parametrize("name", FIELDS)
def test_dataclass_fields(name: str) -> None:
    wanted = FIELDS[name]
    found = dataclasses.fields(getattr(models, name))
    named = [field for field in found if not field.kw_only]
    assert [field.name for field in named][: len(wanted)] == list(wanted)
    for field in found:
        has_default = not (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if field.name not in wanted:
            assert has_default, f"{field.name} is ours and needs a default"
        elif wanted[field.name] is REQUIRED:
            assert not has_default, field.name
        elif wanted[field.name] is ...:
            assert has_default, field.name
        else:
            assert field.default == wanted[field.name]


def test_the_fields_of_a_result_that_are_ours() -> None:
    names = {field.name for field in dataclasses.fields(models.GenerationResult)}
    assert names >= {"token_ids", "spans", "recomputed_tokens", "finish_reason"}
    for name in ("exact_tokens", "approximate_tokens", "saved_tokens"):
        assert hasattr(models.GenerationResult, name)


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 3], [255, 256, 65_535, 65_536, 4_294_967_295]])
@pytest.mark.parametrize("parent", [None, "", "ab" * 32])
def test_hashes(ids: list[int], parent: str | None) -> None:
    raw = struct.pack(f"<{len(ids)}I", *ids)
    assert kvboost.content_hash_from_tokens(ids) == hashlib.sha256(raw).hexdigest()
    start = parent.encode() if parent else b"root"
    assert kvboost.chained_hash(ids, parent) == hashlib.sha256(start + raw).hexdigest()


def test_hashes_that_never_change() -> None:
    assert (
        kvboost.content_hash_from_tokens([1, 2, 3])
        == "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"
    )
    root = kvboost.chained_hash([1, 2, 3])
    assert root == hashlib.sha256(b"root\1\0\0\0\2\0\0\0\3\0\0\0").hexdigest()
    assert kvboost.chained_hash([1, 2, 3], root) != root
    assert models.chunk_id_from_tokens is models.content_hash_from_tokens


def a_chunk(**changes: Any) -> models.CachedChunk:
    pair = (torch.zeros(1, 2, 100, 50), torch.zeros(1, 2, 100, 50))
    values: dict[str, Any] = {
        "chunk_id": "0123456789abcdef" * 4,
        "text": "x",
        "token_ids": list(range(100)),
        "past_key_values": (pair, pair),
        "position_start": 128,
        "position_end": 228,
    }
    return models.CachedChunk(**{**values, **changes})


def test_cached_chunk() -> None:
    before = time.time()
    chunk = a_chunk()
    assert before <= chunk.created_at <= time.time()
    assert chunk.length == 100
    chunk.touch()
    assert chunk.access_count == 1
    assert chunk.memory_bytes() == 4 * 2 * 100 * 50 * 4
    shown = repr(chunk)
    for part in ("01234567", "128", "228", "100", "0.16 MB", "1 hit"):
        assert part in shown
    assert "012345678" not in shown


def test_assembled_prompt() -> None:
    prompt = models.AssembledPrompt([5, 6, 7], None, 0, [5, 6, 7], [0, 1, 2], [], 0.0)
    assert prompt.total_length == 3


def test_warm_result() -> None:
    result = models.WarmResult(2, 20, 16, False, 4)
    assert result
    assert int(result) == 2
    assert "x" * result == "xx"  # type: ignore[operator]
    assert not models.WarmResult(0, 20, 16, False, 4)
    assert "4" in repr(result)
    assert "aligned" not in repr(result)
    assert "aligned" in repr(models.WarmResult(1, 16, 16, True, 0))


# --- compat ----------------------------------------------------------------------------------


def test_supported_architectures() -> None:
    assert {f"{name}ForCausalLM" for name in SUPPORTED} <= set(kvboost.SUPPORTED_ARCHITECTURES)


def test_unsupported_architectures_have_reasons() -> None:
    assert set(UNSUPPORTED) <= set(kvboost.UNSUPPORTED_ARCHITECTURES)
    for name, word in UNSUPPORTED.items():
        assert word in kvboost.UNSUPPORTED_ARCHITECTURES[name]
    assert not set(kvboost.UNSUPPORTED_ARCHITECTURES) & set(kvboost.SUPPORTED_ARCHITECTURES)


# --- the command line ------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    from kvboost.cli.main import main

    return dict(main.commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str) -> None:
    assert (name in commands()) == (f"command {name}" not in NOT_YET)


@pytest.mark.parametrize("flag", FLAGS)
def test_engine_options_are_flags(flag: str) -> None:
    flags = {name for parameter in commands()["generate"].params for name in parameter.opts}
    assert (flag in flags) == (f"flag {flag}" not in NOT_YET)


# --- the engine's meaning --------------------------------------------------------------------

MakeEngine = Callable[..., InferenceEngine]
TEXT = "a text that is longer than one chunk"


@pytest.mark.parametrize(("name", "value"), VALUES, ids=[value_label(*pair) for pair in VALUES])
def test_values_of_the_constructor(make_engine: MakeEngine, tmp_path: Any, name: str, value: Any) -> None:
    given = str(tmp_path) if name == "disk_cache_dir" else value
    if value_label(name, value) in NOT_YET:
        with pytest.raises(InvalidRequestError, match=name):
            make_engine(**{name: given})
    else:
        make_engine(**{name: given})


def test_strategies_and_modes_are_enums_or_strings(make_engine: MakeEngine) -> None:
    engine = make_engine(recompute_strategy="cacheblend")
    for mode in (*models.GenerationMode, *(member.value for member in models.GenerationMode)):
        result = engine.generate(TEXT, 2, mode)
        assert type(result.mode) is str
        assert result.mode == models.GenerationMode(mode).value
    with pytest.raises(InvalidRequestError, match="mode"):
        engine.generate(TEXT, 2, "fastest")
    with pytest.raises(InvalidRequestError, match="recompute_strategy"):
        make_engine(recompute_strategy="fastest")


def test_an_unknown_option_is_an_error_that_names_it(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="chunk_sise"):
        InferenceEngine.from_pretrained("nowhere/nothing", chunk_sise=3)
    with pytest.raises(ValueError, match="tempreature"):
        make_engine().generate(TEXT, 2, tempreature=0.5)


@pytest.mark.parametrize(
    "prompt", [TEXT, [70, 71, 72, 73], [{"role": "user", "content": TEXT}]], ids=["text", "ids", "messages"]
)
def test_a_prompt_is_text_ids_or_messages(make_engine: MakeEngine, prompt: Any) -> None:
    engine = make_engine()
    answer = engine.generate(prompt, 3)
    assert engine.generate(prompt, 3, "baseline").token_ids == answer.token_ids
    assert engine.warm(prompt)
    assert "".join(engine.stream(prompt, 3)) == answer.output_text
    assert engine.prepare(prompt)["input_ids"].shape == (1, answer.prompt_tokens)
    assert engine.pin(prompt) == engine.unpin(prompt) > 0
    assert engine.explain(prompt).prompt_tokens == answer.prompt_tokens


def test_what_was_seen_is_in_the_cache_without_warming(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.generate(TEXT, 6)
    assert first.cached_tokens == 0
    again = engine.generate(TEXT, 6)
    assert again.cached_tokens == again.prompt_tokens - 1
    prompt = engine.tokenizer(TEXT)["input_ids"]
    longer = engine.generate([*prompt, *first.token_ids, 70], 2)
    assert longer.cached_tokens >= first.prompt_tokens + first.generated_tokens - 1, "the answer's too"


def test_baseline_neither_reads_nor_writes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    result = engine.generate(TEXT, 3, "baseline")
    assert engine.cache_stats()["chunks"] == 0
    engine.warm(TEXT)
    before = engine.cache_stats()
    result = engine.generate(TEXT, 3, "baseline")
    assert (result.cached_tokens, result.kv_reuse_ratio, result.recomputed_tokens) == (0, 0.0, 0)
    assert engine.cache_stats()["chunks"] == before["chunks"]


def test_numbers_of_a_result(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(TEXT[:20])
    started = time.perf_counter()
    result = engine.generate(TEXT, 4)
    wall_ms = (time.perf_counter() - started) * 1e3
    assert result.prompt == TEXT
    assert result.prompt_tokens == len(TEXT)
    assert result.cached_tokens == 20
    assert result.kv_reuse_ratio == result.cached_tokens / result.prompt_tokens
    assert result.generated_tokens == len(result.token_ids) == 4
    assert result.output_text == engine.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert 0 < result.ttft_ms <= result.total_ms <= wall_ms
    assert result.tokens_per_sec > 0
    assert result.finish_reason == "length"
    assert result.recomputed_tokens == 0
    assert (result.exact_tokens, result.approximate_tokens, result.saved_tokens) == (20, 0, 20)
    position = 0
    for span in result.spans:
        assert span.start == position < span.end
        position = span.end
    assert position == result.prompt_tokens
    assert {str(span.origin.value) for span in result.spans} == {"exact", "live"}


def test_ttft_holds_all_work_before_the_first_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(TEXT)
    slow = 0.05

    def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            time.sleep(slow)
            return function(*arguments, **options)

        return wrapper

    engine.core.parts.reader.read = delayed(engine.core.parts.reader.read)  # type: ignore[method-assign]
    engine.cache_manager.match_prefix = delayed(engine.cache_manager.match_prefix)  # type: ignore[method-assign]
    engine.assembler.place_parts = delayed(engine.assembler.place_parts)  # type: ignore[method-assign]
    assert engine.generate(TEXT, 2).ttft_ms >= 3 * slow * 1e3


def test_warm_says_what_it_stored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    aligned = engine.warm(TEXT[:16])
    assert (int(aligned), aligned.token_count, aligned.chunk_size) == (2, 16, 8)
    assert (aligned.chunk_boundary_aligned, aligned.partial_tail_tokens) == (True, 0)
    assert aligned.alignment_warning is None
    tail = engine.warm(TEXT[:21])
    assert (tail.chunk_boundary_aligned, tail.partial_tail_tokens) == (False, 5)
    assert tail.alignment_warning
    assert engine.generate(TEXT[:22], 1).cached_tokens == 21


def test_text_warmed_at_an_offset_is_no_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.warm(TEXT, position_offset=8)
    assert engine.generate(TEXT, 1, "prefix_cache").cached_tokens == 0


def test_salts_do_not_see_each_other(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate(TEXT, 2, cache_salt="one")
    other = engine.generate(TEXT, 2, cache_salt="two")
    assert other.cached_tokens == 0
    assert other.spans[0].reason == "never stored"
    assert engine.generate(TEXT, 2, cache_salt="one").cached_tokens > 0


def test_a_seed_makes_sampling_repeatable(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answers = [engine.generate(TEXT, 8, do_sample=True, seed=seed).token_ids for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_a_stream_has_pieces_and_a_result(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(TEXT, 5)
    pieces = list(stream)
    assert "".join(pieces) == stream.result.output_text
    assert stream.result.token_ids == engine.generate(TEXT, 5, "baseline").token_ids
    with engine.stream(TEXT, 100) as early:
        next(early)
    assert engine.generate(TEXT, 2).generated_tokens == 2, "closing early releases everything"


def test_prepare_and_commit(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(TEXT[:20])
    prepared = engine.prepare(TEXT)
    assert set(prepared) == {"input_ids", "attention_mask", "past_key_values"}
    assert prepared["past_key_values"].get_seq_length() == 20
    output = engine.model.generate(**prepared, max_new_tokens=4, do_sample=False)
    assert output[0, len(TEXT) :].tolist() == engine.generate(TEXT, 4, "baseline").token_ids
    engine.commit(prepared, output)
    assert engine.generate(TEXT, 1).cached_tokens == len(TEXT) - 1


def test_explain_tells_what_would_be_reused_and_why_not(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.warm(TEXT[:20])
    before = engine.cache_stats()
    explained = engine.explain(TEXT)
    assert engine.cache_stats() == before, "it changes nothing"
    result = engine.generate(TEXT, 1)
    assert [(s.start, s.end, s.origin, s.reason) for s in explained] == [
        (s.start, s.end, s.origin, s.reason) for s in result.spans
    ]
    assert "".join(span.text for span in explained) == TEXT


def test_pinned_text_stays(make_engine: MakeEngine) -> None:
    engine = make_engine(max_chunks=4)
    engine.warm(TEXT[:16])
    assert engine.pin(TEXT[:16]) == 16
    for letter in "bcdefghi":
        engine.warm(letter * 16)
    assert engine.generate(TEXT[:17], 1).cached_tokens == 16
    engine.unpin(TEXT[:16])
    for letter in "bcdefghi":
        for _ in range(3):
            engine.generate(letter * 17, 1)
    assert engine.explain(TEXT[:17]).cached_tokens < 16


def test_a_saved_cache_is_loaded_again(make_engine: MakeEngine, tmp_path: Any) -> None:
    first, second = make_engine(), make_engine()
    first.warm(TEXT)
    first.warm(TEXT, cache_salt="salt")
    first.save(tmp_path / "cache")
    second.load(tmp_path / "cache")
    for salt, cached in (("", len(TEXT) - 1), ("salt", len(TEXT) - 1), ("other", 0)):
        result = second.generate(TEXT, 4, cache_salt=salt)
        assert result.cached_tokens == cached
        assert result.token_ids == second.generate(TEXT, 4, "baseline").token_ids


def test_clear_close_and_context(make_engine: MakeEngine) -> None:
    with make_engine() as engine:
        engine.warm(TEXT)
        engine.clear()
        assert engine.cache_stats()["chunks"] == engine.cache_stats()["bytes"] == 0
        assert engine.generate(TEXT, 1).cached_tokens == 0
    engine.close()
    engine.close()


def test_assemble() -> None:
    manager = kvboost.KVCacheManager(chunk_size=4)
    tokens = list(range(10))
    parent = None
    for start, end in ((0, 4), (4, 8)):
        key = kvboost.chained_hash(tokens[start:end], parent)
        kv = torch.arange(start, end, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 3).contiguous()
        assert manager.store(
            kvboost.CachedChunk(key, "", tokens[start:end], ((kv, kv + 100),), start, end, key)
        )
        parent = key
    found = kvboost.PromptAssembler(manager).assemble(tokens)
    assert found.full_token_ids == tokens
    assert (found.cached_length, found.live_token_ids, found.live_position_ids) == (8, [8, 9], [8, 9])
    assert found.chunk_boundaries == [(0, 4), (4, 8)]
    assert found.cache_hit_ratio == 0.8
    assert not found.has_approximate
    assert found.runs == ((0, 8, 0, True),)
    assert found.cached_past_kv is not None
    (key_tensor, value_tensor) = found.cached_past_kv[0]
    assert key_tensor.shape == (1, 2, 8, 3)
    assert key_tensor[0, 0, :, 0].tolist() == list(range(8))
    assert value_tensor[0, 1, :, 2].tolist() == [100 + position for position in range(8)]
    nothing = kvboost.PromptAssembler(manager, "prefix_only").assemble([50, 51])
    assert (nothing.cached_past_kv, nothing.cached_length, nothing.cache_hit_ratio) == (None, 0, 0.0)
