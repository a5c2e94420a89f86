"""Your own `model.generate`: kvboost prepares its inputs, and stores what came of it."""

from __future__ import annotations

from kvboost import KVBoost

LIST = "Stock: nine barrels of water, four of flour, two of salt, one of lamp oil, six coils of rope. "
QUESTIONS = ("How much water is there?", "How many coils of rope are there?")


def main(engine: KVBoost | None = None) -> list[int]:
    """Prepare, generate, commit; returns how many tokens of each prompt were known before."""
    engine = engine or KVBoost.from_pretrained("builtin")
    known = []
    for question in QUESTIONS:
        prompt = f"{LIST * 4}\nQuestion: {question}\nAnswer:"
        prepared = engine.prepare(prompt, max_new_tokens=8)
        output = engine.model.generate(**prepared, max_new_tokens=8, do_sample=False)
        stored = engine.commit(prepared, output)
        prompt_tokens = prepared["input_ids"].shape[1]
        known.append(sum(span.length for span in prepared.spans if span.origin.value != "live"))
        print(engine.tokenizer.decode(output[0, prompt_tokens:], skip_special_tokens=True))
        print(f"  {known[-1]} of {prompt_tokens} tokens were known; chunks stored: {stored.stored}")
    return known


if __name__ == "__main__":
    main()
