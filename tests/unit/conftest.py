"""Tiny models and tokenizers, built in code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.threads import one_torch_thread

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Byte-level BPE that knows a few merges, so that `a` + `b` re-encodes as `ab`."""

    def make(
        chat_template: str | None = CHAT_TEMPLATE, *, bos: bool = False, eos: bool = False
    ) -> PreTrainedTokenizerFast:
        special = ["<s>", "</s>", "<|start|>", "<|end|>"]
        words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "th", "the"]
        tokenizer = Tokenizer(
            models.BPE(
                vocab={word: index for index, word in enumerate(words)},
                merges=[("a", "b"), ("t", "h"), ("th", "e")],
            )
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
        if bos or eos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}",
                special_tokens=[("<s>", 0), ("</s>", 1)],
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="</s>",
            additional_special_tokens=["<|start|>", "<|end|>"],
            chat_template=chat_template,
            clean_up_tokenization_spaces=False,
        )

    return make


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., LlamaForCausalLM]:
    """A random Llama with grouped heads; the same seed gives the same weights."""

    def make(*, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
        settings: dict[str, Any] = {
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()

    return make
