"""Loading a model and its tokenizer by hub name, folder, GGUF file, or the names `builtin` and `random:...`.

Knows no cache and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost.errors import InvalidRequestError
from kvboost.loading.embedded import BUILTIN_NAME, ensure_checkpoint
from kvboost.loading.random_models import is_random, load_random

_TOKENIZER_OPTIONS = frozenset(
    {"gguf_file", "revision", "trust_remote_code", "token", "cache_dir", "local_files_only", "subfolder"}
)


def load(model_name: str, options: Mapping[str, Any], device: Any = "cpu") -> tuple[Any, Any]:
    """Load `(model, tokenizer)`. Remote code runs only if `trust_remote_code=True` is passed.

    A random model is made on `device`; others are loaded, and moved by whoever asked.
    """
    if is_random(model_name):
        return load_random(model_name, options, device)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = str(ensure_checkpoint()) if model_name == BUILTIN_NAME else model_name
    settings = {"trust_remote_code": False, **options}
    if "torch_dtype" in settings:
        settings["dtype"] = settings.pop("torch_dtype")
    shared = {name: value for name, value in settings.items() if name in _TOKENIZER_OPTIONS}
    config = AutoConfig.from_pretrained(source, **shared)
    if getattr(config, "is_encoder_decoder", False):
        names = ", ".join(getattr(config, "architectures", None) or [type(config).__name__])
        raise InvalidRequestError(
            f"{model_name} ({names}) is an encoder-decoder model; "
            "kvboost reuses the KV of decoder-only models"
        )
    tokenizer = AutoTokenizer.from_pretrained(source, **shared)
    model = AutoModelForCausalLM.from_pretrained(source, **settings)
    model.config._name_or_path = model_name  # what the user calls it, not where it happens to lie
    return model.eval(), tokenizer
