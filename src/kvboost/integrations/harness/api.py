"""The parts of lm_eval that are needed on import: a missing or unfit lm_eval is reported here, once.

What only running tasks needs, `command` imports when it is called. Knows no engine.
"""

from __future__ import annotations

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        normalize_gen_kwargs,
        postprocess_generated_text,
        resolve_max_length,
    )
    from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window
except ImportError as error:
    raise ImportError(f"kvboost.integrations.lm_eval needs lm_eval ({error}): pip install lm_eval") from error

__all__ = [
    "TemplateLM",
    "get_rolling_token_windows",
    "handle_non_serializable",
    "handle_stop_sequences",
    "make_disjoint_window",
    "normalize_gen_kwargs",
    "postprocess_generated_text",
    "register_model",
    "resolve_max_length",
]
