"""A tiny engine to check the contract's meaning on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvboost import KVBoost
from tests.threads import one_torch_thread

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=259,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=2,
        )
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<|start|>", "<|end|>", "</s>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        additional_special_tokens=special[:2],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def make_engine(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Callable[..., KVBoost]]:
    engines: list[KVBoost] = []

    def make(**options: Any) -> KVBoost:
        engines.append(KVBoost(model, tokenizer, **{"chunk_size": 8, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.cache_manager.check_integrity()
        engine.close()
