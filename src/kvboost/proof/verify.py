"""Is what an engine reuses right? Its answers against BASELINE, and each of its parts by itself.

Answers show that something is wrong, the parts (`checks`) show what it is. Verdicts for exact, quantized and
approximate reuse are given apart, each by its own bound. Knows the engine as far as `Verifiable` says.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList

from kvboost import html_view
from kvboost.choices import GenerationMode, Origin
from kvboost.errors import InvalidRequestError
from kvboost.proof.checks import run_checks
from kvboost.proof.fresh_engine import Verifiable
from kvboost.proof.measures import (
    APPROXIMATE,
    EXACT,
    QUANTIZED,
    Check,
    Recorder,
    divergence,
    max_kl,
    some_text,
)
from kvboost.requests.prompts import Prompt

_SYNTHETIC_TOKENS = 400
_WARM_SHARE = 0.7  # of a prompt is read before it is asked, up to a token that ends no chunk
Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PromptCheck:
    """One prompt answered with reuse and without.

    `first_difference` is the number of the first token that differs, None where none does. `kl` (nats) and
    `largest_logit_difference` are those at the first token; `agreement` is the share of BASELINE's tokens
    that are the likeliest with reuse too, each behind BASELINE's own tokens.
    """

    prompt: str
    prompt_tokens: int
    new_tokens: int
    same_tokens: bool
    first_difference: int | None
    kl: float
    largest_logit_difference: float
    agreement: float
    reuse_share: float
    origins: dict[str, float]


@dataclass(frozen=True)
class Verdict:
    """What one kind of reuse amounts to; `passed` is None where it was not tried, and `detail` says why."""

    kind: str
    passed: bool | None
    value: float | None
    bound: float | None
    detail: str = ""


@dataclass(frozen=True)
class CorrectnessReport:
    """Truthy exactly when greedy output with reuse equals BASELINE's on all prompts.

    `passed` wants more: all verdicts and all checks as well. `failed` names the checks that failed.
    """

    model: str
    dtype: str
    device: str
    mode: str
    max_new_tokens: int
    prompts: tuple[PromptCheck, ...]
    checks: tuple[Check, ...]
    verdicts: tuple[Verdict, ...]
    seconds: float

    def __bool__(self) -> bool:
        return all(prompt.same_tokens for prompt in self.prompts)

    @property
    def passed(self) -> bool:
        """Whether the answers are equal, every check passed, and every kind of reuse kept its bound."""
        judged = [*(check.passed for check in self.checks), *(verdict.passed for verdict in self.verdicts)]
        return bool(self) and False not in judged

    @property
    def failed(self) -> list[str]:
        """The parts that are wrong, by name."""
        return [check.name for check in self.checks if check.passed is False]

    def verdict(self, kind: str) -> Verdict:
        """The verdict on "exact", "quantized" or "approximate" reuse."""
        return next(verdict for verdict in self.verdicts if verdict.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {"equal": bool(self), "passed": self.passed, "failed": self.failed, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        equal = sum(prompt.same_tokens for prompt in self.prompts)
        lines = [f"{equal} of {len(self.prompts)} answers equal BASELINE's ({self.model}, {self.dtype})"]
        lines += [f"{name:12} {word:10} {detail}".rstrip() for name, word, detail in self._rows()]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, str]]:
        words = {True: "passed", False: "FAILED", None: "not tried"}
        judged = [(v.kind, v.passed, v.detail) for v in self.verdicts]
        judged += [(c.name, c.passed, c.detail) for c in self.checks]
        return [(name, words[passed], detail) for name, passed, detail in judged]

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        head = html_view.paragraph(str(self).splitlines()[0])
        return head + html_view.table(("part", "verdict", ""), self._rows())


def verify(
    engine: Verifiable,
    prompts: Sequence[Prompt] | int | None,
    max_new_tokens: int,
    mode: GenerationMode,
    *,
    report: Report = lambda _done, _total, _what: None,
) -> CorrectnessReport:
    """Answer the prompts both ways, and check the engine's parts. None = one prompt of our own.

    A number in the place of prompts is `max_new_tokens`, as in the older call.
    """
    started = time.perf_counter()
    given = None if isinstance(prompts, int) else prompts
    max_new_tokens = prompts if isinstance(prompts, int) else max_new_tokens
    asked = _read(engine, given, max_new_tokens)
    steps = len(asked) + 1
    answered = []
    with engine.core.notice.paused():  # the report says what was approximate
        for number, ids in enumerate(asked):
            report(number, steps, f"prompt {number + 1}")
            answered.append(check_prompt(engine, ids, max_new_tokens, mode))
    report(len(asked), steps, "the engine's parts")
    checks = tuple(run_checks(engine, asked, lambda what: report(len(asked), steps, what)))
    report(steps, steps, "done")
    return CorrectnessReport(
        model=str(getattr(engine.model.config, "_name_or_path", "") or type(engine.model).__name__),
        dtype=str(engine.model.dtype).removeprefix("torch."),
        device=str(engine.model.get_input_embeddings().weight.device),
        mode=mode.value,
        max_new_tokens=max_new_tokens,
        prompts=tuple(answered),
        checks=checks,
        verdicts=_verdicts(engine, answered, checks),
        seconds=time.perf_counter() - started,
    )


def _read(engine: Verifiable, prompts: Sequence[Prompt] | None, max_new_tokens: int) -> list[list[int]]:
    """The prompts as token ids; an error names the one that is wrong."""
    if prompts is None:
        return [some_text(engine, _SYNTHETIC_TOKENS)]
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise InvalidRequestError("prompts must be a list of at least one prompt, or None for one of our own")
    asked = [_tokenized(engine, index, prompt) for index, prompt in enumerate(prompts)]
    for index, ids in enumerate(asked):
        needed, room = len(ids) + max_new_tokens, engine.max_positions
        if room is not None and needed > room:
            raise InvalidRequestError(
                f"prompt {index}: prompt and max_new_tokens need {needed} positions "
                f"({len(ids)} + {max_new_tokens}), the model has {room}"
            )
    return asked


def _tokenized(engine: Verifiable, index: int, prompt: Prompt) -> list[int]:
    try:
        return engine.tokenize(prompt)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"prompt {index}: {error}") from error


def check_prompt(
    engine: Verifiable, token_ids: list[int], max_new_tokens: int, mode: GenerationMode
) -> PromptCheck:
    """Answer a prompt without reuse, then with all that is stored of it and a part that is read now."""
    plain, reused = Recorder(), Recorder()
    expected = engine.generate(
        token_ids, max_new_tokens, GenerationMode.BASELINE, logits_processor=LogitsProcessorList([plain])
    )
    if len(token_ids) > 1:
        engine.warm(token_ids[: max(1, int(_WARM_SHARE * len(token_ids)))])
    result = engine.generate(token_ids, max_new_tokens, mode, logits_processor=LogitsProcessorList([reused]))
    same = result.token_ids == expected.token_ids
    forced = reused
    if not same:
        forced = Recorder(expected.token_ids)
        engine.generate(token_ids, max_new_tokens, mode, logits_processor=LogitsProcessorList([forced]))
    pairs = zip(result.token_ids, expected.token_ids, strict=False)
    different = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
    if different is None and not same:
        different = min(len(result.token_ids), len(expected.token_ids))
    size = min(len(forced.logits), len(plain.logits))
    want, got = torch.stack(plain.logits[:size]), torch.stack(forced.logits[:size])
    total = len(token_ids)
    shares = {
        origin.value: sum(span.length for span in result.spans if span.origin is origin) / total
        for origin in Origin
    }
    return PromptCheck(
        prompt=_shortened(result.prompt),
        prompt_tokens=total,
        new_tokens=len(expected.token_ids),
        same_tokens=same,
        first_difference=different,
        kl=divergence(want[:1], got[:1]),
        largest_logit_difference=float((want[0] - got[0]).abs().max()),
        agreement=float((want.argmax(-1) == got.argmax(-1)).float().mean()),
        reuse_share=result.kv_reuse_ratio,
        origins=shares,
    )


def _verdicts(
    engine: Verifiable, prompts: Sequence[PromptCheck], checks: Sequence[Check]
) -> tuple[Verdict, ...]:
    """One verdict per kind of reuse. Answers of this engine count as the kind that it makes."""
    worst = max(prompt.kl for prompt in prompts)
    answers = f"{sum(p.same_tokens for p in prompts)} of {len(prompts)} answers equal, KL {worst:.2g}"
    own_kind = QUANTIZED if engine.is_quantized else EXACT
    bound = max_kl(engine, own_kind)
    # A quantized cache may turn a close choice; its bound is on the distribution.
    equal = engine.is_quantized or all(prompt.same_tokens for prompt in prompts)
    if any(prompt.origins[APPROXIMATE] + prompt.origins["recomputed"] > 0 for prompt in prompts):
        own_kind, bound, equal = APPROXIMATE, max_kl(engine, APPROXIMATE), True
    found = {own_kind: Verdict(own_kind, equal and worst <= bound, worst, bound, answers)}
    for kind in (EXACT, QUANTIZED, APPROXIMATE):
        parts = [check for check in checks if check.kind == kind]
        tried = [check for check in parts if check.passed is not None]
        wrong = [check for check in tried if not check.passed]
        value = max((check.value for check in tried if check.value is not None), default=None)
        own = found.get(kind)
        if own is None:
            reason = "; ".join(check.detail for check in (wrong or tried or parts) if check.detail)
            passed = not wrong if tried else None
            found[kind] = Verdict(kind, passed, value, max_kl(engine, kind), reason)
        elif wrong:
            detail = f"{own.detail}; wrong: {', '.join(check.name for check in wrong)}"
            found[kind] = dataclasses.replace(own, passed=False, detail=detail)
    return tuple(found[kind] for kind in (EXACT, QUANTIZED, APPROXIMATE))


def _shortened(text: str, longest: int = 60) -> str:
    words = " ".join(text.split())
    return words if len(words) <= longest else words[: longest - 1] + "…"
