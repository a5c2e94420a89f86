"""What a model's rotary embedding means for reuse: how far KV stays exact, and how keys are moved.

Rope types whose frequencies depend on the length of the sequence (dynamic, longrope) give a token
another key once the sequence outgrows the original range, so even a prefix is exact only inside
that range. With all other types a key moves by `shift` positions when its pairs of channels turn by
`shift * inv_freq`. Which layers turn, and by which frequencies, is measured and not read from the
config. Knows no store and no prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from kvboost.compat import (
    SUPPORTED_ARCHITECTURES,
    architecture_of,
    probing,
    rotary_modules,
    text_config,
)
from kvboost.kernels import turning
from kvboost.kernels.fallback import launched
from kvboost.kernels.windows import windows_of
from kvboost.kv.arena import Arena
from kvboost.kv.layout import HeadRange, KVLayout, head_blocks

GATED_REASON = "gated: rope changes with length"
LENGTH_REASON = "exact reuse only: rope changes with length"
WINDOW_REASON = "exact reuse only: the sliding window is shorter than the prompt"

# Temporaries of a block should stay in the caches of a CPU's cores, and be a small part of a GPU's memory.
_CPU_BLOCK_ELEMENTS = 2**19  # per thread
_GPU_BLOCK_ELEMENTS = 2**25

_PROBE_TOKENS = 24
_PROBE_SHIFTS = (37, 1000)
# Models compute angles in float32, whatever their own type; deeper layers add the noise of the others.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_CLEARLY_BETTER = 4.0


def rope_parameter_sets(model: Any) -> list[dict[str, Any]]:
    """The model's rope parameters, one dict per set (some models have one per kind of layer)."""
    config = text_config(model)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        return [dict(value) for value in parameters.values()]
    return [dict(parameters)]


def _rope_type(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def exact_range_tokens(model: Any) -> int | None:
    """Longest sequence, answer included, over which cached KV stays exact; None = no such limit."""
    config = text_config(model)
    limits = []
    for parameters in rope_parameter_sets(model):
        kind = _rope_type(parameters)
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if "dynamic" in kind:
            # transformers falls back to the original frequencies only strictly below the limit
            limits.append(int(original or config.max_position_embeddings) - 1)
        elif kind in ("longrope", "su"):
            limits.append(int(original or config.max_position_embeddings))
    return min(limits, default=None)


def max_positions(model: Any) -> int | None:
    """Longest sequence the model is made for; None = the config does not say."""
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    factors = [
        float(parameters.get("factor") or 1.0)
        for parameters in rope_parameter_sets(model)
        if "dynamic" in _rope_type(parameters)
    ]
    return int(limit * max(factors, default=1.0))


def reset_dynamic_frequencies(model: Any) -> None:
    """Put dynamic rope back to its original frequencies, as in a freshly loaded model.

    transformers keeps the frequencies of the longest sequence seen, so that the same prompt gives
    other tokens the second time. Starting from the original ones, the answer depends on the prompt alone.
    """
    for module in _dynamic_modules(model):
        names = [*vars(module), *module._buffers]  # a plain attribute or a buffer, by version
        for name in [name for name in names if name.endswith("original_inv_freq")]:
            prefix = name.removesuffix("original_inv_freq")
            current = getattr(module, f"{prefix}inv_freq")
            original = getattr(module, name).to(current.device).clone()
            module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
            if hasattr(module, f"{prefix}max_seq_len_cached"):
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _dynamic_modules(model: Any) -> Iterator[Any]:
    for _, module in rotary_modules(model):
        if "dynamic" in str(getattr(module, "rope_type", "")):
            yield module


def approximate_limit_tokens(model: Any) -> int | None:
    """Longest prompt whose keys may be moved: the smallest sliding window in use; None = no limit."""
    learned = windows_of(model)
    if learned.layers:
        return learned.smallest
    named = getattr(
        text_config(model), "sliding_window", None
    )  # the masks were not seen, so this errs on the safe side
    return named if isinstance(named, int) and named < learned.range_tokens else None


def scattered_refusal(model: Any) -> str:
    """Why a forward over scattered positions, with our masks, is not the model's own; "" = it is."""
    learned = windows_of(model)
    was_tested = architecture_of(model) in SUPPORTED_ARCHITECTURES  # honours the masks that it is given
    return "" if learned.is_own_attention and was_tested else learned.refusal


@dataclass(frozen=True)
class Turn:
    """How the keys of a layer turn per position: pair number i by `inv_freq[i]` radians.

    The pairs lie in the first `2 * len(inv_freq)` channels, and the others stay: adjacent ones
    (0, 1), (2, 3), ... when `interleaved`, else (0, r), (1, r + 1), ... with r pairs.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool

    @property
    def channels(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class KeyRotation:
    """What turns the keys of each layer; None for a layer without rotation."""

    layers: tuple[Turn | None, ...]

    def rotate_(
        self,
        slabs: Sequence[torch.Tensor],
        layout: KVLayout,
        start: int,
        end: int,
        shift: int | torch.Tensor,
    ) -> None:
        """Move the keys at positions `[start, end)` of all layers by `shift`, in place.

        `shift` is one number, or one for each of them `[end - start]`. `slabs` are `[..., heads, tokens,
        head_dim]` as `layout` says. The scale stays: what a rope type multiplies into its cos and sin
        (yarn) is in the keys already.
        """
        tokens = min(slab.shape[-2] for slab in slabs)
        if not 0 <= start <= end <= tokens:
            raise ValueError(f"expected 0 <= start <= end <= {tokens} tokens, got [{start}, {end})")
        if start == end or (isinstance(shift, int) and shift == 0):
            return
        for turn, keys in self._views(slabs, layout, start, end):
            on_cpu = keys.device.type == "cpu"
            limit = _CPU_BLOCK_ELEMENTS * torch.get_num_threads() if on_cpu else _GPU_BLOCK_ELEMENTS
            per_token = keys.numel() // keys.shape[-2]
            size = max(1, limit // per_token)
            for number, block in enumerate(torch.split(keys, size, dim=-2)):
                here = shift if isinstance(shift, int) else shift[number * size : (number + 1) * size]
                _turn_(block, turn, here)

    def rotate_all_(
        self,
        slabs: Sequence[torch.Tensor],
        layout: KVLayout,
        stretches: Sequence[tuple[int, int, int]],
    ) -> None:
        """Move the keys at positions `[start, end)` of each stretch by its shift, in place.

        On a GPU in one launch. `slabs` are `[1, heads, tokens, head_dim]` as `layout` says.
        """
        moved = [each for each in stretches if each[2] and each[1] > each[0]]
        if not moved:
            return
        rows: dict[tuple[Turn, int], list[int]] = {}
        for turn, (keys, _) in zip(self.layers, layout.layers, strict=True):
            if turn is not None:
                rows.setdefault((turn, keys.slab), []).extend(range(keys.start, keys.end))
        launches = [
            partial(turning.turn, slabs[number][0], heads, moved, turn.inv_freq, interleaved=turn.interleaved)
            for (turn, number), heads in rows.items()
        ]
        can_turn = all(slab.shape[0] == 1 and turning.can_turn(slab[0]) for slab in slabs)
        if launches and can_turn and launched("turning keys", launches[0]):
            for launch in launches[1:]:
                launch()
            return
        for start, end, shift in moved:
            self.rotate_(slabs, layout, start, end, shift)

    def _views(
        self, slabs: Sequence[torch.Tensor], layout: KVLayout, start: int, end: int
    ) -> Iterator[tuple[Turn, torch.Tensor]]:
        """Views `[..., layers, kv_heads, tokens, channels]` of keys that turn alike.

        The heads of layers with the same turn mostly lie at equal distances, so that one view takes all.
        """
        groups: dict[Turn, list[HeadRange]] = {}
        for turn, (keys, _) in zip(self.layers, layout.layers, strict=True):
            if turn is not None:
                groups.setdefault(turn, []).append(keys)
        for turn, ranges in groups.items():
            for block in head_blocks(ranges):
                yield turn, block.of(slabs[block.slab][..., start:end, : turn.channels])


def _turn_(keys: torch.Tensor, turn: Turn, shift: int | torch.Tensor) -> None:
    """Turn `[..., tokens, channels]` in place by `shift` positions, with one rounding at the end."""
    if keys.dtype not in (torch.float32, torch.float64):
        exact = keys.float()
        _turn_(exact, turn, shift)
        keys.copy_(exact)
        return
    of_shift = _cos_sin if isinstance(shift, torch.Tensor) else _cos_sin_of_one
    cos, sin = of_shift(turn.inv_freq, shift, keys.device, keys.dtype)  # type: ignore[arg-type]
    pairs = len(turn.inv_freq)
    if turn.interleaved:
        torch.view_as_complex(torch.unflatten(keys, -1, (pairs, 2))).mul_(torch.complex(cos, sin))
        return
    # Four passes over halves and one temporary: the fastest of those tried.
    first, second = keys[..., :pairs], keys[..., pairs:]
    first_part = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    torch.addcmul(first_part, second, cos, out=second)


def _cos_sin(
    inv_freq: tuple[float, ...], shifts: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[tokens, pairs]` of shifts `[tokens]`, or `[pairs]` of one.

    The angle is taken in float64: it may be thousands of turns.
    """
    angles = shifts.cpu().double().unsqueeze(-1) * torch.tensor(inv_freq, dtype=torch.float64)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@lru_cache(maxsize=64)
def _cos_sin_of_one(
    inv_freq: tuple[float, ...], shift: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return _cos_sin(inv_freq, torch.tensor(shift), device, dtype)


def learn_rotation(model: Any, layout: KVLayout) -> KeyRotation | str:
    """Measure which rotation moves the keys of each layer; a reason where none does.

    Runs one short text at three places, and leaves the model as it was. The caller holds the model
    lock.
    """
    if exact_range_tokens(model) is not None:
        return LENGTH_REASON
    if reason := scattered_refusal(model):
        return f"exact reuse only: {reason}"
    turns = _known_turns(model)
    if not turns:
        return "exact reuse only: the model has no rotary frequencies"
    still, moved = _probe(model, layout)
    none = KeyRotation((None,) * len(layout.layers))
    candidates = [none, *(_wherever_it_fits(turn, layout) for turn in turns)]
    key_errors = [_errors(candidate, layout, still, moved, part=0) for candidate in candidates]
    value_errors = _errors(none, layout, still, moved, part=1)
    chosen: list[Turn | None] = []
    for layer, (keys, _) in enumerate(layout.layers):
        tolerance = _TOLERANCE.get(layout.slabs[keys.slab].dtype, 1e-1)
        errors = [of_layers[layer] for of_layers in key_errors]
        best = min(range(len(errors)), key=errors.__getitem__)
        turn = candidates[best].layers[layer]
        unclear = turn is not None and errors[best] * _CLEARLY_BETTER > errors[0]
        if unclear or not errors[best] <= tolerance:
            problem, error = f"the keys of layer {layer} do not turn with", errors[best]
            return f"exact reuse only: {problem} their position (error {error:.2g})"
        if not value_errors[layer] <= tolerance:
            problem, error = f"the values of layer {layer} change with", value_errors[layer]
            return f"exact reuse only: {problem} their position (error {error:.2g})"
        chosen.append(turn)
    if not any(chosen):  # where position ids are ignored, all layers look like layers without rotation
        return "exact reuse only: no layer's keys turn with their position"
    return KeyRotation(tuple(chosen))


def _known_turns(model: Any) -> list[Turn]:
    """Every set of frequencies on the model's rotary modules, with either way to form pairs."""
    turns: dict[Turn, None] = {}
    for _, module in rotary_modules(model):
        for name, value in {**vars(module), **module._buffers}.items():
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                # the very numbers that the model multiplies its positions with, however rounded
                inv_freq = tuple(value.double().tolist())
                turns.update({Turn(inv_freq, interleaved): None for interleaved in (False, True)})
    return list(turns)


def _wherever_it_fits(turn: Turn, layout: KVLayout) -> KeyRotation:
    head_dims = [layout.slabs[keys.slab].head_dim for keys, _ in layout.layers]
    return KeyRotation(tuple(turn if turn.channels <= head_dim else None for head_dim in head_dims))


def _probe(model: Any, layout: KVLayout) -> tuple[Arena, dict[int, Arena]]:
    """KV of a short text at the first positions, and by shift further on."""
    limit = max_positions(model)
    shifts = sorted({shift if limit is None else min(shift, limit // 2) for shift in _PROBE_SHIFTS})
    device = model.get_input_embeddings().weight.device
    ids = (torch.arange(_PROBE_TOKENS) * 7919 % text_config(model).vocab_size).to(device).unsqueeze(0)
    arenas = {shift: Arena(layout, _PROBE_TOKENS) for shift in (0, *shifts)}
    with probing(model, "measuring how its keys turn with their position"):
        for shift, arena in arenas.items():
            positions = torch.arange(shift, shift + _PROBE_TOKENS, device=device).unsqueeze(0)
            model(input_ids=ids, position_ids=positions, past_key_values=arena, use_cache=True)
    return arenas.pop(0), arenas


def _errors(
    candidate: KeyRotation, layout: KVLayout, still: Arena, moved: dict[int, Arena], part: int
) -> list[float]:
    """Per layer, how far `still` turned by `candidate` is from `moved`; part 0 is keys, 1 values."""
    worst = [0.0] * len(layout.layers)
    for shift, arena in moved.items():
        turned = [slab.clone() for slab in still.slabs]
        candidate.rotate_(turned, layout, 0, _PROBE_TOKENS, shift)
        for layer, ranges in enumerate(layout.layers):
            where = ranges[part]
            got, want = (slabs[where.slab][0, where.start : where.end] for slabs in (turned, arena.slabs))
            error = _relative_error(got.double(), want.double())
            worst[layer] = max(worst[layer], math.inf if math.isnan(error) else error)
    return worst


def _relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error of `[kv_heads, tokens, head_dim]`, each channel measured by its own size.

    Some models (Qwen2) have a few channels a hundred times louder than all others, which hardly
    turn: by the norm of the whole, keys that were not turned at all would look right.
    """
    size = want.norm(dim=-2)
    size = size.clamp_min(1e-3 * float(size.square().mean().sqrt())).clamp_min(1e-12)
    return float(((got - want).norm(dim=-2) / size).square().mean().sqrt())
