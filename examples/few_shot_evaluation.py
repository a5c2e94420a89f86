"""A few-shot evaluation: the examples are read once, a question once for all its choices."""

from __future__ import annotations

from kvboost import KVBoost
from kvboost.models import ScoreResult

SEEN = {"Italy": "Rome", "Spain": "Madrid", "Greece": "Athens", "Austria": "Vienna", "Egypt": "Cairo"}
SHOTS = "".join(f"Country: {country}\nCapital: {capital}\n\n" for country, capital in SEEN.items())
QUESTIONS = {"France": "Paris", "Germany": "Berlin", "Japan": "Tokyo", "England": "London"}
CHOICES = tuple(QUESTIONS.values())


def main(engine: KVBoost | None = None) -> list[ScoreResult]:
    """Score every choice behind every question; the likeliest is the answer."""
    engine = engine or KVBoost.from_pretrained("builtin")
    asked = [(country, choice) for country in QUESTIONS for choice in CHOICES]
    prompts = [f"{SHOTS}Country: {country}\nCapital:" for country, _ in asked]
    scores = engine.score(prompts, [f" {choice}" for _, choice in asked])
    right = 0
    for number, (country, truth) in enumerate(QUESTIONS.items()):
        of_question = scores[number * len(CHOICES) : (number + 1) * len(CHOICES)]
        answer = CHOICES[max(range(len(CHOICES)), key=lambda index: of_question[index].log_likelihood)]
        right += answer == truth
        print(f"{country}: {answer}")
    print(f"{right} of {len(QUESTIONS)} right")
    cached, total = (sum(getattr(s, name) for s in scores) for name in ("cached_tokens", "prompt_tokens"))
    print(f"{cached} of {total} prompt tokens from the cache")
    return scores


if __name__ == "__main__":
    main()
