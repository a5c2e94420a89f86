"""Models of known shapes with random weights: for timing where no checkpoint can be had.

What they say is noise; what a forward costs is what it costs for any model of the shape. Bytes are tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost.errors import InvalidRequestError

PREFIX = "random:"
# hidden, intermediate, layers, heads, KV heads, vocabulary
_SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "tiny": (64, 96, 3, 4, 2, 512),
    "1b": (2048, 8192, 16, 32, 8, 128_256),
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
}
_POSITIONS = 131_072
_SEED = 0


def is_random(model_name: str) -> bool:
    """Whether the name asks for a random model."""
    return model_name.startswith(PREFIX)


def load_random(model_name: str, options: Mapping[str, Any], device: Any) -> tuple[Any, Any]:
    """`(model, tokenizer)` of a name like "random:8b", made on `device` where it is to run."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = _SHAPES.get(model_name.removeprefix(PREFIX))
    if shape is None:
        names = ", ".join(f"{PREFIX}{name}" for name in _SHAPES)
        raise InvalidRequestError(f"there is no random model {model_name!r}; there are {names}")
    unknown = set(options) - {"dtype", "torch_dtype", "attn_implementation"}
    if unknown:
        raise InvalidRequestError(f"a random model takes no option {min(unknown)}; only dtype and attention")
    dtype = options.get("dtype", options.get("torch_dtype", "float32"))
    dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    dtype = torch.bfloat16 if dtype == "auto" else dtype
    hidden, intermediate, layers, heads, kv_heads, vocabulary = shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=_POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        attn_implementation=options.get("attn_implementation", "sdpa"),
    )
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(_SEED)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
    model.config._name_or_path = model_name
    model.generation_config.pad_token_id = 0
    return model.eval(), byte_tokenizer()


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
