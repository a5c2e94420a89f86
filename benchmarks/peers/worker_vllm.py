"""vLLM on the CPU with automatic prefix caching, its engine in this process. Token ids in, token ids out."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from protocol import Clock, Peer, answered, packed, serve, versions
from vllm import EngineArgs, LLMEngine, SamplingParams


class VLLM(Peer):
    def load(self, model: str, gguf: str | None, context_tokens: int, threads: int) -> dict[str, Any]:  # noqa: ARG002
        self._requests = 0
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                dtype="float32",
                max_model_len=context_tokens,
                max_num_seqs=1,
                enable_prefix_caching=True,
                max_logprobs=-1,
            )
        )
        return {
            "versions": versions("vllm-cpu", "torch", "transformers"),
            "weights": "float32",
            "distribution": True,
            "note": "automatic prefix caching, engine in the worker's own process",
        }

    def warm(self, token_ids: list[int], text: str) -> dict[str, Any]:
        self.answer(token_ids, text, 1, False)
        return {}

    def answer(self, token_ids: list[int], text: str, new_tokens: int, distribution: bool) -> dict[str, Any]:  # noqa: ARG002
        params = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            min_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if distribution else None,
        )
        self._requests += 1
        clock = Clock()
        self._engine.add_request(str(self._requests), {"prompt_token_ids": token_ids}, params)
        result: Any = None
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                result = output
                while len(clock.times_ms) < len(output.outputs[0].token_ids):
                    clock.token()
        said = result.outputs[0]
        logits = None
        if distribution:
            first = said.logprobs[0]
            logits = packed(first[token].logprob for token in sorted(first))
        return answered(
            clock,
            token_ids=list(said.token_ids),
            reused_tokens=result.num_cached_tokens,
            logits=logits,
        )


if __name__ == "__main__":
    serve(VLLM())
