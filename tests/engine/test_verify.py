"""verify_correctness: it passes where all is right, and names the part that was broken on purpose."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from kvboost import CorrectnessReport
from kvboost.errors import InvalidRequestError
from kvboost.kernels import folded, packed
from kvboost.kernels.scattered import ScatteredAttention
from kvboost.kv import arena, rope
from kvboost.kv import codec as kv_codec
from kvboost.reuse import chunk_writer as writer
from kvboost.run import decode
from tests.fixture_types import MakeEngine
from tests.tiny_models import ARCHITECTURES, LENGTH_DEPENDENT, random_ids

PROMPT = random_ids(120, 5)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_sound_engine_passes(make_engine: MakeEngine, name: str) -> None:
    report = make_engine(name).verify_correctness(max_new_tokens=8)
    assert report
    assert report.passed, str(report)
    assert report.failed == []
    assert report.verdict("exact").passed


@pytest.mark.parametrize("name", list(LENGTH_DEPENDENT))
def test_rope_that_changes_with_length(make_engine: MakeEngine, name: str) -> None:
    report = make_engine(name).verify_correctness(max_new_tokens=8)
    assert report
    assert report.passed, str(report)
    assert report.verdict("approximate").passed is None
    assert "rope changes with length" in report.verdict("approximate").detail


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_bits": 8},
        {"kv_cache_bits": 4},
        {"bit_exact": True},
        {"overlap_k": 8},
        {"dtype": torch.bfloat16},
        {"max_chunks": 2},
        {"recompute_ratio": "auto"},
    ],
    ids=str,
)
def test_other_engines(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    engine = make_engine(**options)
    report = engine.verify_correctness([PROMPT], 8)
    assert report.failed == [], str(report)
    assert (report.verdict("quantized").detail.count("answers equal") == 1) is ("kv_cache_bits" in options)


def test_the_report_says_what_was_compared(make_engine: MakeEngine) -> None:
    engine = make_engine()
    told: list[tuple[int, int, str]] = []
    report = engine.verify_correctness(
        [PROMPT, "some text to read"], 6, report=lambda *step: told.append(step)
    )
    assert isinstance(report, CorrectnessReport)
    first = report.prompts[0]
    assert first.prompt_tokens == 120
    assert first.new_tokens == 6
    assert first.reuse_share == pytest.approx(84 / 120)
    assert first.origins == pytest.approx({"exact": 0.7, "approximate": 0, "recomputed": 0, "live": 0.3})
    assert first.first_difference is None
    assert first.agreement == 1.0
    assert 0 <= first.kl < 1e-4
    assert first.largest_logit_difference < 1e-2
    assert told[0][:2] == (0, 3)
    assert told[-1] == (3, 3, "done")
    document = json.loads(json.dumps(report.to_dict()))
    assert document["equal"] is True
    assert document["passed"] is True
    assert [each["kind"] for each in document["verdicts"]] == ["exact", "quantized", "approximate"]
    assert "2 of 2 answers equal" in str(report)
    assert "<table>" in report._repr_html_()


def test_the_older_call(make_engine: MakeEngine) -> None:
    report = make_engine().verify_correctness(5)
    assert report.max_new_tokens == 5
    assert len(report.prompts) == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[7], []], "prompt 1: the prompt is empty"),
        ([], "prompts must be a list of at least one prompt"),
        ("text", "prompts must be a list of at least one prompt"),
        ([[99_999]], "prompt 0: token id 99999"),
    ],
)
def test_bad_prompts(make_engine: MakeEngine, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make_engine().verify_correctness(prompts)


def test_short_prompts(make_engine: MakeEngine) -> None:
    report = make_engine().verify_correctness([[7], [7, 8], [9, 9, 9]], 4)
    assert report.passed, str(report)


# --- broken on purpose -----------------------------------------------------------------------


def test_wrong_rotation(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    right = rope.KeyRotation.rotate_

    def one_further(self: Any, slabs: Any, layout: Any, start: int, end: int, shift: Any) -> None:
        right(self, slabs, layout, start, end, shift + 1)

    monkeypatch.setattr(rope.KeyRotation, "rotate_", one_further)
    report = engine.verify_correctness([PROMPT], 6)
    assert not report.passed
    assert report.failed == ["rotation"]
    assert report.verdict("approximate").passed is False
    assert report.verdict("exact").passed


def test_rotation_that_was_wrong_from_the_start(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at load refuses approximate reuse then; a model known to turn its keys is not excused."""
    right = rope.KeyRotation.rotate_

    def backwards(self: Any, slabs: Any, layout: Any, start: int, end: int, shift: Any) -> None:
        right(self, slabs, layout, start, end, -shift)

    monkeypatch.setattr(rope.KeyRotation, "rotate_", backwards)
    report = make_engine().verify_correctness([PROMPT], 6)
    assert report.failed == ["rotation"]


def test_stale_kv_under_a_prefix_hash(make_engine: MakeEngine) -> None:
    """The KV of other tokens stands where this prompt's should."""
    engine = make_engine()
    engine.warm(PROMPT)
    engine.warm(random_ids(120, 6))
    namespace = engine.namespace()
    stale = engine.cache_manager.match_prefix(PROMPT, namespace).matches[2].chunk
    other = engine.cache_manager.match_prefix(random_ids(120, 6), namespace).matches[2].chunk
    for mine, theirs in zip(_tensors(stale), _tensors(other), strict=True):
        mine.copy_(theirs)
    engine.core.parts.workspace.drop()
    report = engine.verify_correctness([PROMPT], 12)
    assert not report
    assert not report.passed
    assert report.failed == ["stored KV"]
    assert report.verdict("exact").passed is False
    assert report.prompts[0].first_difference is not None
    assert report.prompts[0].kl > 1e-3


def _tensors(chunk: Any) -> list[torch.Tensor]:
    return [tensor for pair in chunk.past_key_values for tensor in pair]


def test_mask_off_by_one(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query misses the token before its own last one."""
    engine = make_engine()
    right = folded._fold_mask

    def shifted(mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
        made = right(mask, group, dtype).clone()
        made[..., -2] = torch.finfo(dtype).min
        return made

    monkeypatch.setattr(folded, "_fold_mask", shifted)
    report = engine.verify_correctness([PROMPT], 6)
    assert not report.passed
    assert report.failed[0] == "attention"
    assert "not judged, since attention is wrong" in {check.detail for check in report.checks}


def test_mask_off_by_one_in_the_arena(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest key is left out where there is one query."""
    engine = make_engine()
    update = arena.ArenaLayer.update

    def short(self: Any, *args: Any, **kwargs: Any) -> Any:
        key, value = update(self, *args, **kwargs)
        if args[0].shape[-2] == 1 and self._arena.scatter_slots is None:
            return key[:, :, :-1], value[:, :, :-1]
        return key, value

    monkeypatch.setattr(arena.ArenaLayer, "update", short)
    report = engine.verify_correctness([PROMPT], 6)
    assert report.failed[0] == "attention"


def test_position_off_by_one(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill behind cached text starts one position too far."""
    engine = make_engine()
    right = decode.prefill

    def further(model: Any, token_ids: Any, cache: Any, end: int, **options: Any) -> None:
        offset = options.pop("position_offset", 0) + (1 if cache.get_seq_length() else 0)
        right(model, token_ids, cache, end, position_offset=offset, **options)

    monkeypatch.setattr(decode, "prefill", further)
    report = engine.verify_correctness([PROMPT], 6)
    assert not report.passed
    assert report.failed == ["positions"]
    assert "keys stand +1 positions" in next(c.detail for c in report.checks if c.name == "positions")


def test_all_positions_off_by_one(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    right = decode.prefill

    def further(model: Any, token_ids: Any, cache: Any, end: int, **options: Any) -> None:
        offset = options.pop("position_offset", 0) - 1
        right(model, token_ids, cache, end, position_offset=offset + 2, **options)

    monkeypatch.setattr(decode, "prefill", further)
    report = engine.verify_correctness([PROMPT], 6)
    assert report.failed == ["positions"]


def test_swapped_layers_in_the_store(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored as layer 0 is that of layer 2."""
    engine = make_engine()
    right = writer.ChunkWriter.keep_from

    def swapped(self: Any, token_ids: Any, between: Any, namespace: Any, **options: Any) -> Any:
        def wrong(start: int, end: int) -> Any:
            (slab,) = between(start, end)
            layers = list(engine.layout.layers)
            order = [layers[2], layers[1], layers[0]]
            heads = [head for pair in order for part in pair for head in range(part.start, part.end)]
            return (slab[heads],)

        return right(self, token_ids, wrong, namespace, **options)

    monkeypatch.setattr(writer.ChunkWriter, "keep_from", swapped)
    report = engine.verify_correctness([PROMPT], 6)
    engine.core.parts.workspace.drop()
    again = engine.verify_correctness([PROMPT], 6)
    for found in (report, again):
        assert not found.passed
        assert "layers" in found.failed
    assert "layer 0 holds what belongs to layer 2" in next(
        c.detail for c in report.checks if c.name == "layers"
    )


def test_swapped_keys_and_values(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    right = arena.ArenaLayer.bind

    def swapped(self: Any) -> None:
        right(self)
        if self._index == 1:
            self._keys, self._values = self._values, self._keys

    monkeypatch.setattr(arena.ArenaLayer, "bind", swapped)
    report = engine.verify_correctness([PROMPT], 6)
    assert not report.passed


def test_wrong_scatter_mask(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repaired tokens see the one behind them."""
    engine = make_engine()
    right = ScatteredAttention.mask

    def further(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.positions = self.positions + 1
        try:
            return right(self, *args, **kwargs)
        finally:
            self.positions = self.positions - 1

    monkeypatch.setattr(ScatteredAttention, "mask", further)
    report = engine.verify_correctness([PROMPT], 6)
    assert report.failed == ["sparse pass"]


def test_wrong_merging_of_rows(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    right = packed._Layer.add

    def doubled(self: Any, first: int, last: int, part: torch.Tensor, sums: torch.Tensor) -> None:
        right(self, first, last, part, sums + 3.0)

    monkeypatch.setattr(packed._Layer, "add", doubled)
    report = engine.verify_correctness([PROMPT], 6)
    assert report.failed == ["batches"]


def test_wrong_scales_of_quantized_kv(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    right = kv_codec.StoredKV.place

    def louder(self: Any, target: Any, at: int, start: int, end: int) -> None:
        right(self, target, at, start, end)
        if self.codec.is_lossy:
            for slab in target.slabs:
                slab[:, :, at : at + end - start] *= -1

    monkeypatch.setattr(kv_codec.StoredKV, "place", louder)
    report = engine.verify_correctness([PROMPT], 6)
    assert report.failed == ["quantized"]
    assert report.verdict("quantized").passed is False
    assert report.verdict("exact").passed


def test_a_failing_check_is_no_equal_answer(make_engine: MakeEngine) -> None:
    """Truth is about the answers alone, as the contract says."""
    report = make_engine().verify_correctness([PROMPT], 4)
    wrong = dataclasses.replace(report.checks[0], passed=False)
    changed = dataclasses.replace(report, checks=(wrong, *report.checks[1:]))
    assert changed
    assert not changed.passed
    other = dataclasses.replace(report.prompts[0], same_tokens=False)
    assert not dataclasses.replace(report, prompts=(other,))
