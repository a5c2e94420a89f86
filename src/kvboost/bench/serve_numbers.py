"""What the replies of `bench serve` come to: throughput, times, gaps between tokens, targets.

Knows replies, neither servers nor prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.bench.record import at_least, at_most
from kvboost.bench.serve_servers import ALONE, KVBOOST, PAGED, PLAIN, ServerFailedError
from kvboost.bench.stream_client import Reply

LEAST_OVER = {ALONE: 2.0, PAGED: 2.0, PLAIN: 4.0}
LEAST_OVER_RAG = ((128, 2.5), (48, 1.8))  # answers of at least so many tokens, one by one in so much less
MAX_GAP_RATIO = 4.0


def summary(rounds: Sequence[Sequence[Reply]]) -> dict[str, Any]:
    """One server's numbers: throughput as the median of the rounds, times over all requests."""
    replies = [reply for replies in rounds for reply in replies]
    answered = [reply for reply in replies if reply.is_answered]
    walls = [max(each.ended_at for each in one) - min(each.asked_at for each in one) for one in rounds]
    tokens = [sum(reply.completion_tokens for reply in one if reply.is_answered) for one in rounds]
    counts = [sum(reply.is_answered for reply in one) for one in rounds]
    cached = [reply.cached_tokens for reply in answered]
    prompt_tokens = sum(int(reply.usage.get("prompt_tokens", 0)) for reply in answered)
    known = [tokens for tokens in cached if tokens is not None]
    return {
        "requests": len(replies),
        "answered": len(answered),
        "errors": sorted({why_unanswered(reply) for reply in replies if not reply.is_answered}),
        "wall_s": _middle(walls),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sum(tokens),
        "tokens_per_s": _middle([count / wall for count, wall in zip(tokens, walls, strict=True)]),
        "requests_per_s": _middle([count / wall for count, wall in zip(counts, walls, strict=True)], 3),
        "rounds_tokens_per_s": [round(count / wall, 2) for count, wall in zip(tokens, walls, strict=True)],
        "ttft_ms": percentiles([reply.ttft_s for reply in answered if reply.ttft_s is not None]),
        "gap_ms": percentiles([gap for reply in answered for _, gap in reply.gaps_s]),
        "cached_share": round(sum(known) / prompt_tokens, 3) if known and prompt_tokens else None,
    }


def long_summary(without: Sequence[Reply], beside: Sequence[Reply], long: Reply) -> dict[str, Any]:
    """Gaps between tokens of the steady requests while the long prompt is read, and then without it."""
    if long.ttft_s is None:
        raise ServerFailedError(f"the long prompt was not answered: {why_unanswered(long)}")
    starts = [min(reply.asked_at for reply in replies) for replies in (without, beside)]
    arrived_s = long.asked_at - starts[1]
    gaps: list[dict[str, Any]] = []
    windows = []
    for replies, start in zip((without, beside), starts, strict=True):
        everything = [gap for reply in replies for gap in reply.gaps_s]
        first, last = start + arrived_s, start + arrived_s + long.ttft_s
        window = [gap for came, gap in everything if came >= first and came - gap <= last]
        windows.append(window)
        gaps.append({"all_ms": percentiles([gap for _, gap in everything]), "then_ms": percentiles(window)})
    ratio = None
    if all(windows):
        ratio = round(gaps[1]["then_ms"]["p99"] / gaps[0]["then_ms"]["p99"], 3)
    return {
        "long_prompt_tokens": int(long.usage.get("prompt_tokens", 0)),
        "long_ttft_ms": round(long.ttft_s * 1e3, 1),
        "requests": len(without),
        "unanswered": sum(not reply.is_answered for reply in (*without, *beside, long)),
        "without": gaps[0],
        "with": gaps[1],
        "gap_p99_ratio": ratio,
    }


def targets(
    servers: dict[str, dict[str, Any]],
    long: dict[str, Any] | None,
    least_over: Mapping[str, float] = LEAST_OVER,
) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough; only what was measured."""
    found = []
    for name, least in least_over.items():
        if KVBOOST in servers and name in servers and servers[name]["tokens_per_s"]:
            value = servers[KVBOOST]["tokens_per_s"] / servers[name]["tokens_per_s"]
            found.append(at_least(f"tokens/s: kvboost / {name}", value, least))
    if long is not None and long["gap_p99_ratio"] is not None:
        label = "p99 of gaps: with a long prompt / without"
        found.append(at_most(label, long["gap_p99_ratio"], MAX_GAP_RATIO))
    return found


def percentiles(seconds: Sequence[float]) -> dict[str, Any] | None:
    """Milliseconds at p50, p95 and p99, and the highest; None of nothing."""
    if not seconds:
        return None
    values = sorted(value * 1e3 for value in seconds)
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {
        "p50": round(cuts[49], 1),
        "p95": round(cuts[94], 1),
        "p99": round(cuts[98], 1),
        "high": round(values[-1], 1),
        "count": len(values),
    }


def compare_texts(servers: dict[str, dict[str, Any]], rounds: dict[str, list[list[Reply]]]) -> None:
    """How many answers equal those of the server without batching."""
    reference = rounds.get(ALONE, [])
    for name, found in servers.items():
        pairs = [
            (reply.text, other.text)
            for one, others in zip(rounds[name], reference, strict=False)
            for reply, other in zip(one, others, strict=True)
            if reply.is_answered and other.is_answered
        ]
        found["same_text_as_no_batching"] = sum(ours == theirs for ours, theirs in pairs)
        found["compared"] = len(pairs)


def least_over_rag(new_tokens: int) -> dict[str, float]:
    """How much more than one by one is asked for, where documents are reordered."""
    return {ALONE: next((least for tokens, least in LEAST_OVER_RAG if new_tokens >= tokens), 1.0)}


def differences(rounds: dict[str, list[list[Reply]]]) -> list[dict[str, Any]]:
    """Where answers of the running batch leave those that came one by one, and by how much."""
    found = []
    for ours, theirs in zip(rounds.get(KVBOOST, []), rounds.get(ALONE, []), strict=False):
        for number, (reply, other) in enumerate(zip(ours, theirs, strict=True)):
            pairs = zip(reply.tokens, other.tokens, strict=False)
            at = next((at for at, (one, two) in enumerate(pairs) if one[0] != two[0]), None)
            if at is None:
                continue
            (token, _), (expected, likeliest) = reply.tokens[at], other.tokens[at]
            margin = likeliest[expected] - likeliest[token] if token in likeliest else None
            told = {"request": number, "at": at, "token": token, "one_by_one": expected}
            found.append({**told, "margin_nats": None if margin is None else round(margin, 4)})
    return found


def _middle(values: Sequence[float], digits: int = 2) -> float:
    return round(statistics.median(values), digits)


def why_unanswered(reply: Reply) -> str:
    """Why a request was not answered."""
    if reply.error is not None:
        return reply.error
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:200].decode(errors='replace')}"
    return "the stream ended before the answer did"
