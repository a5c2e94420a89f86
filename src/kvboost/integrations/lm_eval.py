"""EleutherAI's lm-evaluation-harness on a kvboost engine: what prompts share is read once.

    python -m kvboost.integrations.lm_eval --model builtin --tasks arc_easy --num-fewshot 5

lm_eval has no plug-in discovery: importing this module registers the model name `kvboost` with it, and
`evaluate` is the short way to run tasks. Scores are those of lm_eval's own `hf` model. The parts are in
`harness`; they know lm_eval and the engine's public calls, no cache. Needs lm_eval.
"""

from __future__ import annotations

try:
    from kvboost.integrations.harness.command import INTERRUPTED, evaluate, main
    from kvboost.integrations.harness.model import NAME, KVBoostLM, StopText
except ImportError as error:
    if __name__ == "__main__":
        raise SystemExit(f"error: {error}") from error
    raise

__all__ = ["INTERRUPTED", "NAME", "KVBoostLM", "StopText", "evaluate", "main"]

if __name__ == "__main__":
    main(prog_name="python -m kvboost.integrations.lm_eval")
