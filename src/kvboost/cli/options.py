"""The engine's options as flags, each under its own name.

The flags are a plain table, so that `--help` needs no torch; a test compares it with the engine's
signature. A flag that is not given is not passed on: the engine's default holds. Knows no engine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

Command = Callable[..., Any]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def count_or_none(value: Any) -> int | None:
    """A whole number of at least 1, or None for the word none."""
    if str(value).lower() == "none":
        return None
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise click.BadParameter(f'expected a whole number of at least 1 or "none", got {value!r}')
    return count


def size(value: Any, or_none: str = "") -> int:
    """A number of bytes, with a unit if one likes: 4MB, 512KiB."""
    match = re.fullmatch(r"(\d+)\s*([kmg]?i?)b?", str(value).strip().lower())
    if match is None or match[2] not in _UNITS or int(match[1]) < 1:
        raise click.BadParameter(f"expected a size of at least 1, like 4MB{or_none}, got {value!r}")
    return int(match[1]) * _UNITS[match[2]]


def size_or_none(value: Any) -> int | None:
    """A number of bytes, or None for the word none."""
    return None if str(value).lower() == "none" else size(value, ' or "none"')


def seconds_or_none(value: Any) -> float | None:
    """A time greater than 0, or None for the word none."""
    if str(value).lower() == "none":
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise click.BadParameter(f'expected a time greater than 0 or "none", got {value!r}')
    return seconds


@dataclass(frozen=True)
class Flag:
    """One option: its name in Python, what it takes (bool = a switch), its default, what it does."""

    name: str
    kind: Any
    default: Any
    help: str
    default_text: str = ""

    @property
    def spelling(self) -> str:
        dashed = "--" + self.name.replace("_", "-")
        return f"{dashed}/--no-{dashed[2:]}" if self.kind is bool and self.default is not False else dashed

    @property
    def metavar(self) -> str | None:
        return {
            count_or_none: "N|none",
            seconds_or_none: "S|none",
            ratio_or_auto: "SHARE|auto",
            bits: "16|8|4|k8v4",
        }.get(self.kind)


def ratio_or_auto(value: Any) -> float | str:
    """A number from 0 to 1, or the word auto."""
    if str(value).lower() == "auto":
        return "auto"
    try:
        ratio = float(value)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise click.BadParameter(f'expected a number from 0 to 1 or "auto", got {value!r}')
    return ratio


def bits(value: Any) -> int | str:
    """16, 8, 4 or the word k8v4."""
    word = str(value).lower()
    if word not in ("16", "8", "4", "k8v4"):
        raise click.BadParameter(f'expected 16, 8, 4 or "k8v4", got {value!r}')
    return word if word == "k8v4" else int(word)


_COUNT = click.IntRange(min=1)
_LEAST_ZERO = click.IntRange(min=0)

ENGINE_FLAGS = (
    Flag("chunk_size", _COUNT, 128, "Tokens per cached chunk."),
    Flag("max_chunks", count_or_none, 128, 'Chunks that the cache may hold; "none" = no limit.'),
    Flag("max_cache_bytes", size_or_none, None, "Bytes that the cache may hold.", "no limit"),
    Flag(
        "chunk_boundary_window",
        _LEAST_ZERO,
        0,
        "A cut slides by at most this many tokens to a sentence end.",
    ),
    Flag(
        "recompute_ratio",
        ratio_or_auto,
        0.15,
        'Share of approximately reused tokens that is computed again; "auto" = what --max-kl needs.',
    ),
    Flag("max_kl", float, None, "With --recompute-ratio auto: the error that reuse may make.", "none"),
    Flag(
        "selector",
        click.Choice(["guided", "deviation"]),
        "guided",
        "How the tokens to compute again are found.",
    ),
    Flag(
        "recompute_strategy",
        click.Choice(["selective", "cacheblend", "none"]),
        "selective",
        "Repair of prefix chunks with --overlap-k. Moved text always goes through cacheblend.",
    ),
    Flag("recompute_overlap", _LEAST_ZERO, 16, "Tokens that selective computes again at each seam."),
    Flag(
        "overlap_k",
        _LEAST_ZERO,
        0,
        "Encode chunks so that each sees only this many tokens before it; 0 = all, which is exact.",
    ),
    Flag("sink_tokens", _LEAST_ZERO, 0, "So many first positions are never reused approximately."),
    Flag(
        "kv_cache_bits",
        bits,
        16,
        'Bits of a cached number: 16 (as computed), 8, 4, or "k8v4" (keys 8, values 4).',
    ),
    Flag(
        "disk_cache_dir",
        click.Path(file_okay=False),
        None,
        "Keep cached text in this folder too, for later runs and for what RAM has no room for.",
        "none",
    ),
    Flag(
        "disk_cache_bytes",
        size_or_none,
        None,
        "What all models in this folder may take together, such as 20GB.",
        "256 chunks for each",
    ),
    Flag(
        "cache_device",
        click.Choice(["cpu", "model"]),
        "cpu",
        "Where cached KV is kept: RAM, or with the model.",
    ),
    Flag("bit_exact", bool, False, "Make warm and cold logits equal to the last bit."),
    Flag("cache_salt", str, "", "Only requests with the same salt share cached text.", "empty"),
    Flag("prefill_block", count_or_none, None, "Tokens per forward of a long prefill.", "as memory allows"),
    Flag(
        "pack_weights",
        bool,
        None,
        "Keep a copy of float32 weights in the order that a CPU reads fastest.",
        "where memory allows",
    ),
    Flag(
        "weights_check_seconds",
        seconds_or_none,
        60.0,
        'Within so many seconds a write to a part of a weight is noticed; "none" = not looked for.',
    ),
    Flag("device", str, None, 'Where the model runs: "cpu", "cuda", "cuda:1", "mps".', "the best there is"),
    Flag("strict", bool, True, "Refuse architectures that are known not to work, or only warn."),
)
LOADING_FLAGS = (
    Flag(
        "dtype",
        click.Choice(["auto", "float32", "bfloat16", "float16"]),
        None,
        "Number format of the weights.",
        "transformers decides",
    ),
    Flag("revision", str, None, "Branch, tag or commit of a hub model.", "main"),
    Flag("gguf_file", str, None, "A GGUF file in MODEL to load the weights from.", "none"),
    Flag("trust_remote_code", bool, False, "Run code that comes with the model. Off unless you ask for it."),
    Flag(
        "attn_implementation", str, None, 'Attention of transformers: "sdpa", "eager", ...', "sdpa if it can"
    ),
)


def engine_options(command: Command) -> Command:
    """Add every flag to `command`, which gets those that were given as the dict `engine_options`."""
    flags = ENGINE_FLAGS + LOADING_FLAGS

    @functools.wraps(command)
    def with_engine_options(**arguments: Any) -> Any:
        context = click.get_current_context()
        values = {flag.name: arguments.pop(flag.name) for flag in flags}
        given = {
            name: value
            for name, value in values.items()
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT
        }
        return command(**arguments, engine_options=given)

    decorated: Command = with_engine_options
    for flag in reversed(flags):
        decorated = click.option(
            flag.spelling,
            flag.name,
            type=flag.kind,
            is_flag=flag.kind is bool,
            metavar=flag.metavar,
            default=flag.default,
            show_default=flag.default_text or True,
            help=flag.help,
        )(decorated)
    return decorated
