"""The engine's options, each declared once: name, type, default, limits, and what is said about it.

The constructor, `from_pretrained`, the flags of the command line and the table in the docs are all made from
these declarations. Knows names and limits, not what the options do. Imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, cast

from kvboost.choices import REMOTE_WRITES, SELECTORS, KVBits, RecomputeStrategy, choice, is_width
from kvboost.errors import InvalidRequestError
from kvboost.store_address import check_remote_address

DEFAULT_MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
CACHE_DEVICES = ("cpu", "model")
DEFAULT_MAX_KL = 0.05  # the error that reuse may make with recompute_ratio="auto"
GROUPS = ("model", "cache", "reuse", "serving", "advanced")  # in the order in which they are shown

Kind = Literal[
    "text", "switch", "choice", "count", "count or none", "number", "size", "size or none", "seconds",
    "seconds or none", "share or auto", "bits", "folder", "several texts",
]  # fmt: skip


@dataclass(frozen=True)
class Option:
    """What is said about an option wherever it is shown, and how text on a command line becomes its value.

    `default_text` says what the default means where its value does not. `flag` is given where the flag of the
    command line has another name than the option.
    """

    name: str
    default: Any
    group: str
    help: str
    kind: Kind
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    default_text: str = ""
    flag: str = ""
    metavar: str = ""


def about(group: str, says: str, kind: Kind = "text", **more: Any) -> dict[str, Any]:
    """The metadata of a dataclass field that is an option."""
    return {"group": group, "help": says, "kind": kind, **more}


def options_of(settings: type[Any]) -> Iterator[Option]:
    """The options that a dataclass of settings declares, in their order."""
    for each in fields(settings):
        if each.metadata:
            yield Option(name=each.name, default=each.default, **each.metadata)


@dataclass(frozen=True)
class EngineSettings:
    """The options of an engine, checked. A value that makes no sense is an error before anything is done."""

    chunk_size: int = field(
        default=128, metadata=about("cache", "Tokens per cached chunk.", "count", least=1)
    )
    max_chunks: int | None = field(
        default=128,
        metadata=about(
            "cache", 'Chunks that the cache may hold; "none" = no limit.', "count or none", least=0
        ),
    )
    recompute_overlap: int = field(
        default=16,
        metadata=about(
            "advanced", "With --overlap-k: tokens that selective recomputes at each seam.", "count", least=0
        ),
    )
    recompute_strategy: RecomputeStrategy | str = field(
        default=RecomputeStrategy.SELECTIVE,
        metadata=about(
            "advanced",
            "With --overlap-k: how prefix chunks are repaired. Moved text always goes through cacheblend.",
            "choice",
            choices=tuple(each.value for each in RecomputeStrategy),
        ),
    )
    recompute_ratio: float | Literal["auto"] = field(
        default=0.15,
        metadata=about(
            "reuse",
            'Share of the moved tokens that is recomputed; "auto" = what --max-kl needs.',
            "share or auto",
        ),
    )
    kv_cache_bits: int | str | None = field(
        default=16,
        metadata=about(
            "cache", 'Bits of a cached number: 16 (as computed), 8, 4, or "k8v4" (keys 8, values 4).', "bits"
        ),
    )
    disk_cache_dir: str | os.PathLike[str] | None = field(
        default=None,
        metadata=about(
            "cache",
            "Folder that keeps cached text too, for later runs and for what RAM has no room for.",
            "folder",
            default_text="none",
        ),
    )
    device: Any = field(
        default=None,
        metadata=about(
            "model", 'Where the model runs: "cpu", "cuda", "cuda:1", "mps".', default_text="the best there is"
        ),
    )
    _: KW_ONLY
    chunk_boundary_window: int = field(
        default=0,
        metadata=about(
            "advanced", "A cut moves by at most this many tokens to a sentence end.", "count", least=0
        ),
    )
    overlap_k: int = field(
        default=0,
        metadata=about(
            "advanced",
            "Encode each chunk with only this many tokens of context before it; 0 = all, which is exact.",
            "count",
            least=0,
        ),
    )
    sink_tokens: int = field(
        default=0,
        metadata=about(
            "advanced", "This many first positions are never reused approximately.", "count", least=0
        ),
    )
    max_cache_bytes: int | None = field(
        default=None,
        metadata=about(
            "cache",
            "Bytes that the cache may hold, such as 2GB.",
            "size or none",
            least=0,
            default_text="no limit",
        ),
    )
    disk_cache_bytes: int | None = field(
        default=None,
        metadata=about(
            "cache",
            "Bytes that all models in the disk cache folder may take together, such as 20GB.",
            "size or none",
            least=0,
            default_text="256 chunks for each model",
        ),
    )
    remote_cache: str | None = field(
        default=None,
        repr=False,  # it may hold a password
        metadata=about(
            "cache",
            "Store that several machines share, such as redis://host:6379 or s3://bucket/prefix.",
            default_text="none",
        ),
    )
    remote_write: str = field(
        default="all",
        metadata=about(
            "cache", "What goes there: all, or what was reused once.", "choice", choices=REMOTE_WRITES
        ),
    )
    cache_device: str = field(
        default="cpu",
        metadata=about(
            "cache", "Where cached KV is kept: in RAM, or with the model.", "choice", choices=CACHE_DEVICES
        ),
    )
    gpu_cache_bytes: int | None = field(
        default=None,
        metadata=about(
            "cache",
            "Bytes on the GPU for copies of what was used last; 0 = none.",
            "size or none",
            least=0,
            default_text="an eighth of what is free",
        ),
    )
    selector: str = field(
        default="guided",
        metadata=about(
            "reuse",
            "How the tokens to recompute are found.",
            "choice",
            choices=SELECTORS,
        ),
    )
    max_kl: float | None = field(
        default=None,
        metadata=about(
            "reuse",
            "With --recompute-ratio auto: the error that reuse may make. With --min-facts alone, any.",
            "number",
            default_text=f"{DEFAULT_MAX_KL:g}",
        ),
    )
    min_facts: float | None = field(
        default=None,
        metadata=about(
            "reuse",
            "With --recompute-ratio auto: the share of facts that reuse must keep.",
            "number",
            default_text="none",
        ),
    )
    bit_exact: bool = field(
        default=False,
        metadata=about(
            "reuse", "Make the logits of a warm run equal to a cold run's, to the last bit.", "switch"
        ),
    )
    cache_salt: str = field(
        default="",
        metadata=about("cache", "Only requests with the same salt share cached text.", default_text="empty"),
    )
    prefill_block: int | None = field(
        default=None,
        metadata=about(
            "advanced",
            "Tokens per forward of a long prefill.",
            "count or none",
            least=1,
            default_text="as memory allows",
        ),
    )
    pack_weights: bool | None = field(
        default=None,
        metadata=about(
            "advanced",
            "Keep a copy of float32 weights in the order that a CPU reads fastest.",
            "switch",
            default_text="where memory allows",
        ),
    )
    weights_check_seconds: float | None = field(
        default=60.0,
        metadata=about(
            "advanced",
            'A write to a part of a weight is noticed within this time; "none" = it is not looked for.',
            "seconds or none",
        ),
    )

    def __post_init__(self) -> None:
        for each in options_of(EngineSettings):
            if each.kind in ("count", "count or none", "size or none"):
                self._at_least(each)
        choice(RecomputeStrategy, "recompute_strategy", self.recompute_strategy)
        if self.pack_weights not in (True, False, None):
            raise InvalidRequestError(f"pack_weights must be True, False or None, got {self.pack_weights!r}")
        if not (self.weights_check_seconds is None or _is_positive(self.weights_check_seconds)):
            raise InvalidRequestError(
                f"weights_check_seconds must be None or greater than 0, got {self.weights_check_seconds!r}"
            )
        self._check_repair()
        self._check_storage()
        self._check_chunks()

    def _check_repair(self) -> None:
        if self.selector not in SELECTORS:
            words = " or ".join(f'"{each}"' for each in SELECTORS)
            raise InvalidRequestError(f"selector must be {words}, got {self.selector!r}")
        ratio = self.recompute_ratio
        if ratio != "auto" and (isinstance(ratio, (str, bool)) or not 0 <= ratio <= 1):
            raise InvalidRequestError(f'recompute_ratio must be from 0 to 1 or "auto", got {ratio!r}')
        if self.max_kl is not None and not _is_positive(self.max_kl):
            raise InvalidRequestError(f"max_kl must be None or greater than 0, got {self.max_kl!r}")
        if self.min_facts is not None and not (_is_positive(self.min_facts) and self.min_facts <= 1):
            raise InvalidRequestError(f"min_facts must be None or a share up to 1, got {self.min_facts!r}")
        for name in ("max_kl", "min_facts"):
            if getattr(self, name) is not None and ratio != "auto":
                raise InvalidRequestError(f'{name} chooses the ratio: pass recompute_ratio="auto" with it')

    def _check_storage(self) -> None:
        if self.kv_cache_bits is not None and not is_width(self.kv_cache_bits):
            raise InvalidRequestError(
                f'kv_cache_bits must be 16, 8, 4, "k8v4" or None, got {self.kv_cache_bits!r}'
            )
        if self.disk_cache_dir is not None and not isinstance(self.disk_cache_dir, (str, os.PathLike)):
            raise InvalidRequestError(f"disk_cache_dir must be a folder, got {self.disk_cache_dir!r}")
        if self.disk_cache_bytes is not None and self.disk_cache_dir is None:
            raise InvalidRequestError("disk_cache_bytes needs a folder: pass disk_cache_dir with it")
        if self.remote_cache is not None:
            check_remote_address(self.remote_cache)
        if self.remote_write not in REMOTE_WRITES:
            raise InvalidRequestError(f'remote_write must be "all" or "reused", got {self.remote_write!r}')
        if self.cache_device not in CACHE_DEVICES:
            raise InvalidRequestError(f'cache_device must be "cpu" or "model", got {self.cache_device!r}')
        if self.gpu_cache_bytes and self.cache_device == "model":
            raise InvalidRequestError('gpu_cache_bytes is for cache_device="cpu": "model" is the GPU already')
        if not isinstance(self.cache_salt, str):
            raise InvalidRequestError(f"cache_salt must be text, got {self.cache_salt!r}")

    def _check_chunks(self) -> None:
        if not 0 <= self.chunk_boundary_window < self.chunk_size:
            raise InvalidRequestError(
                f"chunk_boundary_window must be from 0 to chunk_size - 1 ({self.chunk_size - 1}), "
                f"got {self.chunk_boundary_window}"
            )
        if not self.bit_exact:
            return
        if self.bits != 16:
            raise InvalidRequestError(
                f"bit_exact needs KV as it was computed: set kv_cache_bits to 16, not {self.kv_cache_bits!r}"
            )
        if self.chunk_boundary_window:
            raise InvalidRequestError("bit_exact needs blocks of equal size: set chunk_boundary_window to 0")
        if self.overlap_k:
            raise InvalidRequestError("bit_exact needs chunks that saw all before them: set overlap_k to 0")

    def _at_least(self, each: Option) -> None:
        value: Any = getattr(self, each.name)
        or_none = each.kind.endswith("or none")
        if value is None and or_none:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < (each.least or 0):
            allowed = f"None or at least {each.least}" if or_none else f"at least {each.least}"
            raise InvalidRequestError(f"{each.name} must be {allowed}, got {value!r}")

    @property
    def bits(self) -> KVBits:
        """How many bits a stored number has."""
        return cast(KVBits, self.kv_cache_bits or 16)

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """`max_kl` and `min_facts` that `recompute_ratio="auto"` has to hold; by default some `max_kl`."""
        default = DEFAULT_MAX_KL if self.min_facts is None else None
        return self.max_kl or default, self.min_facts

    @property
    def block(self) -> int | None:
        """Tokens per forward of a prefill; None = as many as memory allows."""
        return self.chunk_size if self.bit_exact else self.prefill_block

    @property
    def engine_options(self) -> dict[str, Any]:
        """The options of this class by name, as the constructor takes them."""
        return {each.name: getattr(self, each.name) for each in options_of(EngineSettings)}


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class _ModelAndTokenizer:
    model: Any
    tokenizer: Any


@dataclass(frozen=True)
class EngineArguments(EngineSettings, _ModelAndTokenizer):
    """The arguments of the engine's constructor: `model`, `tokenizer`, then the options in their order."""

    _: KW_ONLY
    strict: bool = field(
        default=True,
        metadata=about("model", "Refuse architectures that are known not to work, or only warn.", "switch"),
    )


@dataclass(frozen=True)
class LoadingOptions:
    """Options of transformers' own `from_pretrained`. None = transformers decides."""

    _: KW_ONLY
    dtype: Any = field(
        default=None,
        metadata=about(
            "model",
            "Number format of the weights.",
            "choice",
            choices=("auto", "float32", "bfloat16", "float16"),
            default_text="transformers decides",
        ),
    )
    revision: str | None = field(
        default=None, metadata=about("model", "Branch, tag or commit of a hub model.", default_text="main")
    )
    gguf_file: str | None = field(
        default=None,
        metadata=about("model", "A GGUF file in MODEL to load the weights from.", default_text="none"),
    )
    trust_remote_code: bool = field(
        default=False,
        metadata=about("model", "Run code that comes with the model. Off unless you ask for it.", "switch"),
    )
    attn_implementation: str | None = field(
        default=None,
        metadata=about(
            "model", 'Attention of transformers: "sdpa", "eager", ...', default_text="sdpa if it can"
        ),
    )
    # Without a flag of their own.
    torch_dtype: Any = None
    device_map: Any = None
    max_memory: Any = None
    offload_folder: str | os.PathLike[str] | None = None
    quantization_config: Any = None
    use_safetensors: bool | None = None
    variant: str | None = None
    low_cpu_mem_usage: bool | None = None
    token: str | bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool | None = None
    subfolder: str | None = None

    @property
    def loading_options(self) -> dict[str, Any]:
        """Those that are not the default, by name."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(LoadingOptions)}
        return {name: value for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True)
class _ModelName:
    model_name: str = DEFAULT_MODEL
    strict: bool = True


@dataclass(frozen=True)
class PretrainedArguments(LoadingOptions, EngineSettings, _ModelName):
    """The arguments of `from_pretrained`: `model_name`, `strict`, the options of engine and loading."""

    @classmethod
    def checked(cls, model_name: str, strict: bool, given: dict[str, Any]) -> PretrainedArguments:
        """From what a caller gave; a name that nobody knows is an error."""
        loading = {each.name for each in fields(LoadingOptions)}
        engine = {each.name for each in options_of(EngineSettings)}
        for name in given:
            if name not in loading | engine:
                raise InvalidRequestError(
                    f"unknown option {name!r}; loading options are {', '.join(sorted(loading))}, "
                    f"engine options are {', '.join(sorted(engine))}"
                )
        return cls(model_name, strict, **given)
