"""llama.cpp through llama-cpp-python, on the GGUF file itself. Token ids in, token ids out.

`Llama.generate` keeps the KV of the last sequence and computes only what is behind the common beginning.
"""

from __future__ import annotations

from typing import Any

import llama_cpp
from protocol import Clock, Peer, answered, packed, serve, versions

FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 15: "Q4_K_M"}


class LlamaCpp(Peer):
    def load(self, model: str, gguf: str | None, context_tokens: int, threads: int) -> dict[str, Any]:  # noqa: ARG002
        if gguf is None:
            raise ValueError("llama.cpp needs a GGUF file, and this model has none")
        self._llama = llama_cpp.Llama(
            model_path=gguf,
            n_ctx=context_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            verbose=False,
        )
        file_type = int(self._llama.metadata.get("general.file_type", -1))
        weights = FILE_TYPES.get(file_type, f"file type {file_type}")
        return {
            "versions": versions("llama_cpp_python", "numpy"),
            "weights": f"{weights} (GGUF)",
            "distribution": True,
            "note": f"computes on the {weights} weights of the file, with KV in float16; "
            "the others compute in float32 on the same weights, dequantized",
        }

    def warm(self, token_ids: list[int], text: str) -> dict[str, Any]:  # noqa: ARG002
        self._llama.reset()
        self._llama.eval(token_ids)
        return {}

    def answer(self, token_ids: list[int], text: str, new_tokens: int, distribution: bool) -> dict[str, Any]:  # noqa: ARG002
        kept = _common(list(self._llama.eval_tokens), token_ids)
        noted: list[str] = []

        def note(_ids: Any, scores: Any) -> Any:
            if not noted:
                noted.append(packed(scores.tolist()))
            return scores

        processors = llama_cpp.LogitsProcessorList([note]) if distribution else None
        new_ids: list[int] = []
        clock = Clock()
        for token in self._llama.generate(
            token_ids, temp=0.0, repeat_penalty=1.0, logits_processor=processors
        ):
            clock.token()
            new_ids.append(int(token))
            if len(new_ids) == new_tokens:
                break
        return answered(clock, token_ids=new_ids, reused_tokens=kept, logits=noted[0] if noted else None)


def _common(known: list[int], wanted: list[int]) -> int:
    """How many tokens at the beginning are the same; the last one is always computed."""
    count = 0
    for a, b in zip(known, wanted[:-1]):  # noqa: B905 (of different lengths)
        if a != b:
            break
        count += 1
    return count


if __name__ == "__main__":
    serve(LlamaCpp())
