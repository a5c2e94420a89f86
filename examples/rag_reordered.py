"""Documents that come back in another order: their KV is moved, repaired where it matters, and labelled."""

from __future__ import annotations

from collections import Counter

from kvboost import GenerationResult, KVBoost

DOCUMENTS = (
    "The harbour. Ships have landed at Kaldmouth since the salt trade began. The old quay is made of black "
    "stone from the northern hills and was raised twice after floods. The harbour master keeps a book of all "
    "arrivals, and a copy is sent to the town hall every Friday. Night landings need a lamp on the mast.\n",
    "The mill. Wheat comes down the river on flat boats and is ground by three wheels. The miller takes one "
    "sack in twelve. In dry summers the lower wheel stands still, and bakers buy flour from the plain. A "
    "child is paid to keep the grate free of leaves, which is said to be the first job of every mayor.\n",
    "The library. Two sisters left their books to the town on condition that nobody is asked for a name. "
    "There are maps, almanacs, letters from sailors and a shelf of music. The reading room is warm from "
    "October. Loans are written on a slate, which is wiped at the end of each year, whatever is still out.\n",
)


def main(engine: KVBoost | None = None) -> list[GenerationResult]:
    """Ask about the documents in one order, then in another, and show where each token's KV came from."""
    engine = engine or KVBoost.from_pretrained("builtin")
    results = []
    for order, question in ((0, 1, 2), "What does the miller take?"), ((2, 0, 1), "What stone is the quay?"):
        prompt = "".join(DOCUMENTS[number] for number in order) + f"\nQuestion: {question}\nAnswer:"
        print(f"documents {order}: {engine.explain(prompt)}")
        result = engine.generate(prompt, max_new_tokens=10)
        origins: Counter[str] = Counter()
        for span in result.spans:
            origins[span.origin.value] += span.length
        print(f"  {dict(origins)}{result.output_text!r}\n")
        results.append(result)
    return results


if __name__ == "__main__":
    main()
