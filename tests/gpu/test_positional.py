"""The attention kernel against float64, over random shapes of work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from kvboost.kernels import positional
from kvboost.kernels.positional import DeviceWork
from kvboost.kernels.scope import AttentionCall
from kvboost.kernels.work import SeenKeys, Stretch, work_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SLOTS = 1_200
OWN_SLOTS = 610  # from here on, KV of single sequences


class Shape(NamedTuple):
    group: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


SHAPES = [
    Shape(1, 2, 16, 16),
    Shape(4, 2, 64, 64),
    Shape(4, 2, 80, 80, window=37),
    Shape(7, 1, 96, 96, softcap=20.0),
    Shape(2, 2, 128, 128, sinks=True),
    Shape(4, 1, 256, 256, window=100, softcap=30.0, sinks=True),
    Shape(3, 2, 24, 24, window=8),
    Shape(40, 1, 32, 32),
    Shape(4, 2, 128, 128, torch.bfloat16),
    Shape(8, 1, 64, 64, torch.float16, window=50, sinks=True),
    Shape(16, 1, 128, 64, torch.bfloat16),
    Shape(2, 1, 256, 256, torch.bfloat16, softcap=50.0),
]


class Step(NamedTuple):
    """Sequences behind shared text: what their queries see, and for each query its keys' slots, positions."""

    seen: list[SeenKeys]
    positions: np.ndarray
    keys: list[tuple[np.ndarray, np.ndarray]]


def random_step(rng: np.random.Generator) -> Step:
    shared = Stretch(10, int(rng.integers(1, 500)), 0)
    inner = Stretch(520, int(rng.integers(1, 80)), shared.length)
    seen: list[SeenKeys] = []
    positions: list[int] = []
    keys: list[tuple[np.ndarray, np.ndarray]] = []
    behind_inner: list[int] = []
    slot, at = OWN_SLOTS, 0
    for number in range(int(rng.integers(1, 9))):
        chain = [shared, inner] if number >= 2 else [shared]
        start = chain[-1].position + chain[-1].length
        old, new = int(rng.integers(0, 20)), int(rng.choice([1, 1, 3, 9, 33]))
        own = Stretch(slot, old + new, start)
        new_positions = np.arange(start + old, start + old + new)
        if new == 3:  # somewhere among the others
            new_positions = np.sort(rng.choice(np.arange(start, start + old + new), 3, replace=False))
        seen.append(SeenKeys(at, at + new, [own]))
        positions += new_positions.tolist()
        chain.append(own)
        slots = np.concatenate([np.arange(each.start, each.start + each.length) for each in chain])
        there = np.concatenate([np.arange(each.position, each.position + each.length) for each in chain])
        keys += [(slots, there)] * new
        if number >= 2:
            behind_inner += [at, at + new]
        at += new
        slot += old + new + 2
    seen.append(SeenKeys(0, at, [shared]))
    if behind_inner:
        seen.append(SeenKeys(behind_inner[0], behind_inner[-1], [inner]))
    return Step(seen, np.array(positions), keys)


def expected(shape: Shape, step: Step, call: AttentionCall) -> torch.Tensor:
    query, key, value = (each[0].double() for each in (call.query, call.key, call.value))
    rows = []
    for number, (slots, there) in enumerate(step.keys):
        position = int(step.positions[number])
        visible = there <= position
        if shape.window is not None:
            visible &= there > position - shape.window
        at = torch.from_numpy(slots[visible]).to(query.device)
        grouped = query[:, number].view(shape.kv_heads, shape.group, -1)
        scores = torch.einsum("kgd,ktd->kgt", grouped, key[:, at]) * call.scale
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if shape.sinks:
            sinks = call.extra["s_aux"].double().view(shape.kv_heads, shape.group, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : len(at)]
        rows.append(torch.einsum("kgt,ktd->kgd", weights, value[:, at]).flatten(0, 1))
    return torch.stack(rows)


def lengthened(seen: list[SeenKeys]) -> list[SeenKeys]:
    """With own stretches that reach behind the newest token, as captured steps have them."""
    own = [
        SeenKeys(first, last, [Stretch(start, -(-length // 64) * 64, position)])
        for first, last, [(start, length, position)] in seen
        if start >= OWN_SLOTS
    ]
    return own + [each for each in seen if each.ranges[0].start < OWN_SLOTS]


@pytest.mark.parametrize("how", ["eager", "in parts", "captured"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_float64(shape: Shape, how: str) -> None:
    rng = np.random.default_rng(len(str(shape)) + len(how))
    generator = torch.Generator("cuda").manual_seed(3)
    heads = shape.group * shape.kv_heads

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(shape.dtype)

    for _ in range(12):
        step = random_step(rng)
        tokens = len(step.positions)
        key, value = (random(1, shape.kv_heads, SLOTS, size) for size in (shape.head_dim, shape.value_dim))
        nobodys = torch.ones(SLOTS, dtype=torch.bool, device="cuda")
        nobodys[np.concatenate([slots for slots, _ in step.keys])] = False
        key[:, :, nobodys], value[:, :, nobodys] = float("nan"), float("nan")
        call = AttentionCall(
            torch.nn.Identity(),
            random(1, tokens, heads, shape.head_dim).transpose(1, 2),
            key,
            value,
            None,
            scaling=shape.head_dim**-0.5,
            extra={"softcap": shape.softcap, "s_aux": random(heads) if shape.sinks else None},
        )
        assert not positional.why_not(call)
        tile = positional.tile_of(shape.group, shape.head_dim, shape.dtype, tokens)
        work = work_of(
            lengthened(step.seen) if how == "captured" else step.seen,
            step.positions + 64 if how == "captured" else step.positions,
            group=shape.group,
            kv_heads=shape.kv_heads,
            tile=tile,
            all_in_parts=how != "eager",
        )
        positions = torch.from_numpy(step.positions).cuda()
        on_device = DeviceWork.of(work, positions, heads, shape.value_dim, tile)
        for buffer in (on_device.parts, on_device.sums):
            if buffer is not None:
                buffer.fill_(float("nan"))  # what is not written must not be read
        out = positional.attend(call, on_device, shape.window)[0].double()
        want = expected(shape, step, call)
        error = float((out - want).norm() / want.norm())
        assert error <= (3e-6 if shape.dtype is torch.float32 else 1e-2), (shape, step)
