"""A chat. Each turn computes only what is new: rules, questions and answers before it are in the cache."""

from __future__ import annotations

from kvboost import GenerationResult, KVBoost

RULES = (
    "You are the guide of a small museum by the sea. The museum opens at nine and closes at five. The tower "
    "is closed in winter. The map room shows charts of the coast, the hall of bones a whale, the cellar old "
    "nets and anchors. Tickets are sold at the gate. Dogs wait outside. Answer in one short sentence. "
)
QUESTIONS = ("When does the museum open?", "What is in the cellar?", "May I bring my dog?")


def main(engine: KVBoost | None = None) -> list[GenerationResult]:
    """Ask the questions one after the other, and show how much of each prompt was not computed again."""
    engine = engine or KVBoost.from_pretrained("builtin")
    chat = [{"role": "system", "content": RULES}]
    engine.warm(chat)
    results = []
    for question in QUESTIONS:
        chat.append({"role": "user", "content": question})
        print(f"you:   {question}\nguide: ", end="")
        answer = engine.stream(chat, max_new_tokens=16)
        for piece in answer:
            print(piece, end="", flush=True)
        result = answer.result
        chat.append({"role": "assistant", "content": result.output_text})
        print(f"\n       {result.cached_tokens} of {result.prompt_tokens} tokens from the cache")
        results.append(result)
    return results


if __name__ == "__main__":
    main()
