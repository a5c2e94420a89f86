"""The model that is fuzzed: how it is made, the ways it is changed, and what a request must leave as it is.

Every change is one of `CHANGES[group][way]`, called with the subject, the name of a parameter and a factor.
Values are always "as at first, times a factor", so that weights come back to what they were and stay sane.
Knows torch, transformers and peft, no kvboost.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import peft
import torch
from torch.nn.modules import module as torch_module

from tests.tiny_models import tiny_model

KINDS = ("llama", "mistral", "qwen2", "gemma2")
# Parts of parameter names; the first parameter that has it is changed.
TARGETS = (
    "layers.0.self_attn.k_proj",
    "layers.0.self_attn.v_proj",
    "layers.1.self_attn.q_proj",
    "layers.0.mlp.down_proj",
    "layers.1.mlp.up_proj",
    "layers.0.input_layernorm",
    "embed_tokens",
    "lm_head",
    "model.norm",
    "lora_A",
    "lora_B",
)
UNCOUNTED = ("data.copy_", "data.mul_", "moving average", "foreach", "numpy", "everything")
WHOLE = 0.9  # of its values changed: the tensor was written to as a whole
FACTORS = (1.0, 0.5, 1.5, -1.0)
CONFIG_FIELDS: tuple[tuple[str, Any], ...] = (
    ("use_cache", False),
    ("assistant_early_exit", 1),
    ("prompt_lookup_num_tokens", 2),
    ("num_beams", 2),
    ("cache_implementation", "static"),
    ("cache_implementation", "dynamic"),
    ("return_dict_in_generate", True),
    ("output_scores", True),
    ("output_hidden_states", True),
    ("repetition_penalty", 1.4),
    ("no_repeat_ngram_size", 2),
    ("min_new_tokens", 3),
    ("min_length", 60),
    ("suppress_tokens", [3, 4]),
    ("bad_words_ids", [[5]]),
    ("eos_token_id", [2, 5]),
    ("forced_eos_token_id", 2),
    ("guidance_scale", 1.5),
    ("prefill_chunk_size", 8),
    ("temperature", 0.7),
)
Way = Callable[["Subject", str, float], None]


DEVICE = "cpu"  # where models are made


def is_autocast() -> bool:
    return torch.is_autocast_enabled(DEVICE)


def build(kind: str, seed: int = 0) -> Any:
    """A tiny model whose answers depend on all that it reads, with special tokens among them and dropout."""
    changes: dict[str, Any] = {"num_hidden_layers": 2, "attention_dropout": 0.3}
    if kind in ("qwen2", "gemma2"):
        changes["tie_word_embeddings"] = kind == "qwen2"
    model = tiny_model(kind, seed=seed, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name or "lm_head" in name:
                parameter.mul_(3.0)
            if "v_proj.weight" in name or "o_proj.weight" in name:
                parameter.mul_(2.0)
        head = model.get_output_embeddings().weight
        head[[0, 1, 3, 4, 5]] *= 2.0
        head[2] *= 1.3
    return model.to(DEVICE)


class Subject:
    """One model with all that was done to it. `inner` is the model itself, `adapted` peft's view of it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.inner = build(kind)
        self.adapted: Any = None
        self.adapter_values: dict[str, dict[str, torch.Tensor]] = {}
        self.dtype = torch.float32
        self.ambient = contextlib.ExitStack()
        self.is_autocast = False
        self.hooks: dict[str, Any] = {}
        self.forwards: list[torch.nn.Module] = []
        self.fields: set[str] = set()
        self.num_changes = 0
        self._originals = {name: tensor.detach().clone() for name, tensor in self.inner.named_parameters()}
        self._frequencies = self.rotary.inv_freq.clone()
        self._generation = copy.deepcopy(self.inner.generation_config)
        self._attention = self.inner.config._attn_implementation

    # --- what it is like ---------------------------------------------------------------------

    @property
    def is_random(self) -> bool:
        """Whether dropout may be at work, so that no answer is like another."""
        return any(module.training for module in self.inner.modules())

    @property
    def is_foreign(self) -> bool:
        """Whether it computes in a way that is in no weight: nothing may be read or stored then."""
        return is_autocast() or bool(self.hooks or self.forwards) or self.is_random

    @property
    def is_altered(self) -> bool:
        """Whether something is set that keeps KV from being reused, or changes how answers are chosen."""
        return self.is_foreign or self.dtype is not torch.float32 or bool(self.fields)

    def settle(self) -> None:
        """Take back all of that; weights, buffers and adapters stay as they are."""
        for group, way in (
            ("hooks", "none"),
            ("forwards", "own"),
            ("flags", "eval"),
            ("autocast", "off"),
            ("dtype", "float32"),
            ("config", "reset"),
        ):
            CHANGES[group][way](self, "", 1.0)

    @property
    def rotary(self) -> torch.nn.Module:
        return self.inner.model.rotary_emb

    @property
    def layers(self) -> Any:
        return self.inner.model.layers

    def parameter(self, target: str) -> tuple[str, torch.nn.Parameter]:
        """The first parameter with `target` in its name; where there is none, the embedding."""
        named = list(self.inner.named_parameters())
        found = next(((name, each) for name, each in named if target in name), None)
        return found if found is not None else next(pair for pair in named if "embed_tokens" in pair[0])

    def wanted(self, target: str, factor: float) -> tuple[torch.nn.Parameter, torch.Tensor]:
        """A parameter, and the values that it is to have: those of the beginning times `factor`."""
        name, parameter = self.parameter(target)
        key = name.replace(".base_layer", "")
        original = self._originals.setdefault(key, parameter.detach().clone())
        return parameter, (original * factor).to(parameter.dtype)

    def frequencies(self, factor: float) -> torch.Tensor:
        return (self._frequencies * factor).to(self.rotary.inv_freq.dtype)

    def owner(self, target: str) -> tuple[torch.nn.Module, str]:
        """The module that holds a parameter, and its name there."""
        name, _ = self.parameter(target)
        path, _, own = name.rpartition(".")
        return self.inner.get_submodule(path), own

    # --- changes -----------------------------------------------------------------------------

    def change(self, group: str, way: str, target: str, factor: float) -> bool:
        """Apply one change; True where it wrote to a part of a tensor's values and nothing counts that.

        Values that are written anew and stay the same are not written to, whichever way was taken.
        """
        self.num_changes += 1
        may_be_partial = group == "partial" or (group == "weights" and way in UNCOUNTED)
        before = [each.detach().clone() for each in self.inner.parameters()] if may_be_partial else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft and torch about themselves
            CHANGES[group][way](self, target, factor)
        after = self.inner.parameters() if may_be_partial else ()
        shares = [float((old != new).float().mean()) for old, new in zip(before, after, strict=True)]
        return any(0 < share < WHOLE for share in shares)

    def reset_generation(self) -> None:
        self.inner.generation_config = copy.deepcopy(self._generation)
        self.fields.clear()

    def reset_attention(self) -> None:
        self.inner.set_attn_implementation(self._attention)

    def close(self) -> None:
        """Take back what would outlive the model."""
        for handle in self.hooks.values():
            handle.remove()
        self.ambient.close()

    # --- what a request must leave alone -----------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """What of the model and of torch is the caller's own, and must be as before after a request."""
        modules = list(self.inner.named_modules())
        return {
            "attention": self.inner.config._attn_implementation,
            "training": [name for name, module in modules if module.training],
            "forwards": [
                (name, id(vars(module)["forward"])) for name, module in modules if "forward" in vars(module)
            ],
            "hooks": [
                (name, len(module._forward_hooks), len(module._forward_pre_hooks)) for name, module in modules
            ],
            "global hooks": (
                len(torch_module._global_forward_hooks),
                len(torch_module._global_forward_pre_hooks),
            ),
            "own methods": "prepare_inputs_for_generation" in vars(self.inner),
            "generation": self.inner.generation_config.to_dict(),
            "use_cache": getattr(self.inner.config, "use_cache", None),
            "gradients": [parameter.requires_grad for parameter in self.inner.parameters()],
            "ambient": (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                is_autocast(),
                torch.get_num_threads(),
                torch.get_default_dtype(),
            ),
            "random": None if self.is_random else hash(torch.get_rng_state().numpy().tobytes()),
        }


# --- weights -------------------------------------------------------------------------------------


def _data_copy(subject: Subject, target: str, factor: float) -> None:
    parameter, values = subject.wanted(target, factor)
    parameter.data.copy_(values)


def _data_mul(subject: Subject, target: str, factor: float) -> None:
    parameter, values = subject.wanted(target, factor)
    parameter.data.mul_(0).add_(values)


def _data_assign(subject: Subject, target: str, factor: float) -> None:
    parameter, values = subject.wanted(target, factor)
    parameter.data = values


def _in_place(subject: Subject, target: str, factor: float) -> None:
    parameter, values = subject.wanted(target, factor)
    with torch.no_grad():
        parameter.copy_(values)


def _average(subject: Subject, target: str, factor: float) -> None:
    parameter, values = subject.wanted(target, factor)
    parameter.data.lerp_(values, 0.5)


def _foreach(subject: Subject, target: str, factor: float) -> None:
    pairs = [subject.wanted(each, factor) for each in (target, "layers.0.self_attn.v_proj")]
    torch._foreach_copy_([parameter.data for parameter, _ in pairs], [values for _, values in pairs])


def _vector(subject: Subject, target: str, factor: float) -> None:
    parameter, values = subject.wanted(target, factor)
    torch.nn.utils.vector_to_parameters(values.reshape(-1), [parameter])


def _numpy(subject: Subject, target: str, factor: float) -> None:
    parameter, values = subject.wanted(target, factor)
    if parameter.dtype is torch.bfloat16 or parameter.is_cuda:  # numpy has none of those
        parameter.data.copy_(values)
    else:
        parameter.detach().numpy()[...] = values.numpy()


def _state_dict(subject: Subject, target: str, factor: float) -> None:
    name, _ = subject.parameter(target)
    _, values = subject.wanted(target, factor)
    subject.inner.state_dict()[name].copy_(values)


def _load(subject: Subject, target: str, factor: float, *, assign: bool = False) -> None:
    name, _ = subject.parameter(target)
    _, values = subject.wanted(target, factor)
    state = {key: tensor.detach().clone() for key, tensor in subject.inner.state_dict().items()}
    state[name] = values
    subject.inner.load_state_dict(state, assign=assign)
    if assign:
        subject.inner.tie_weights()
        for parameter in subject.inner.parameters():
            parameter.requires_grad_(False)


def _new_parameter(subject: Subject, target: str, factor: float) -> None:
    module, own = subject.owner(target)
    _, values = subject.wanted(target, factor)
    setattr(module, own, torch.nn.Parameter(values, requires_grad=False))


def _optimizer(subject: Subject, target: str, factor: float) -> None:
    parameter, values = subject.wanted(target, factor)
    needed = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.grad = parameter.detach() - values
    torch.optim.SGD([parameter], lr=1.0).step()
    parameter.grad = None
    parameter.requires_grad_(needed)


def _everything(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    for name, parameter in subject.inner.named_parameters():
        if "lora" not in name:
            parameter.data.copy_(subject.wanted(name, factor)[1])


def _swap_module(subject: Subject, target: str, factor: float) -> None:
    module, own = subject.owner(target)
    if subject.hooks or subject.forwards or "forward" in vars(module):  # a copy would carry them along
        _data_assign(subject, target, factor)
        return
    parent_path, _, child = next(
        path for path, each in subject.inner.named_modules() if each is module
    ).rpartition(".")
    other = copy.deepcopy(module)
    getattr(other, own).data = subject.wanted(target, factor)[1]
    setattr(subject.inner.get_submodule(parent_path), child, other)


# --- a part of a weight ----------------------------------------------------------------------------


def _rows_of(subject: Subject, target: str, factor: float) -> tuple[torch.Tensor, torch.Tensor, int]:
    parameter, values = subject.wanted(target, factor)
    return parameter.data, values, len(values) // 3


def _one_row(subject: Subject, target: str, factor: float) -> None:
    data, values, row = _rows_of(subject, target, factor)
    data[row] = values[row] * 2


def _one_value(subject: Subject, target: str, factor: float) -> None:
    data, values, _ = _rows_of(subject, target, factor)
    data.view(-1)[7] = values.reshape(-1)[7] + 3 * factor


def _a_third(subject: Subject, target: str, factor: float) -> None:
    data, values, row = _rows_of(subject, target, factor)
    data[:row].copy_(values[:row])


def _special_row(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    data, values, _ = _rows_of(subject, "lm_head" if subject.kind != "qwen2" else "embed_tokens", factor)
    data[4] = values[4] * 2


# --- adapters ------------------------------------------------------------------------------------

_LORA = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def _adapters(subject: Subject) -> Any:
    """peft's view of the model, with adapters "one" and "two"; "one" is active."""
    if subject.adapted is None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            subject.adapted = peft.get_peft_model(subject.inner, peft.LoraConfig(**_LORA), adapter_name="one")
            subject.adapted.add_adapter("two", peft.LoraConfig(**_LORA))
        subject.adapted.to(subject.dtype)
        subject.adapted.train(mode=False)
    return subject.adapted


def _inject(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    _adapters(subject)


def _switch(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    adapted = _adapters(subject)
    adapted.set_adapter("two" if "one" in adapted.active_adapters else "one")


def _disable(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    _adapters(subject).base_model.disable_adapter_layers()


def _enable(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    _adapters(subject).base_model.enable_adapter_layers()


def _merge(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    _adapters(subject).merge_adapter()


def _unmerge(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    _adapters(subject).unmerge_adapter()


def _rescale(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    _adapters(subject)
    for layer in subject.layers:
        layer.self_attn.q_proj.scaling = dict.fromkeys(("one", "two"), 4.0 * factor)


def _reload(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    adapted = _adapters(subject)
    name = adapted.active_adapters[0]
    if name not in subject.adapter_values:
        found = peft.get_peft_model_state_dict(adapted, adapter_name=name)
        subject.adapter_values[name] = {key: tensor.detach().clone() for key, tensor in found.items()}
    state = {key: tensor * factor for key, tensor in subject.adapter_values[name].items()}
    peft.set_peft_model_state_dict(adapted, state, adapter_name=name)


# --- buffers -------------------------------------------------------------------------------------


def _buffer_data(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    subject.rotary.inv_freq.data.copy_(subject.frequencies(factor))


def _buffer_in_place(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    subject.rotary.inv_freq.copy_(subject.frequencies(factor))


def _buffer_assign(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    subject.rotary.inv_freq = subject.frequencies(factor)


def _buffer_register(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    subject.rotary.register_buffer("inv_freq", subject.frequencies(factor), persistent=False)


# --- hooks and replaced forwards -----------------------------------------------------------------


def _shifted(output: Any) -> Any:
    """What a steering hook does: the first tensor, with a direction added."""
    if isinstance(output, tuple):
        return (_shifted(output[0]), *output[1:])
    return output + torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype, device=output.device)


def _steer(_module: Any, _inputs: Any, output: Any) -> Any:
    return _shifted(output)


def _steer_input(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return _shifted(inputs)


def _steer_keywords(_module: Any, inputs: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return inputs, {**keywords, "hidden_states": _shifted(keywords["hidden_states"])}


def _hook(name: str, register: Callable[[Subject], Any]) -> Way:
    def way(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
        if name not in subject.hooks:
            subject.hooks[name] = register(subject)

    return way


def _global_hook(subject: Subject, register: Any, steer: Any) -> Any:
    def only_here(module: Any, *arguments: Any) -> Any:
        return steer(module, *arguments) if module is subject.layers[0].mlp else None

    return register(only_here)


def _unhook(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    while subject.hooks:
        subject.hooks.popitem()[1].remove()


def _replace_forward(pick: Callable[[Subject], torch.nn.Module]) -> Way:
    def way(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
        module = pick(subject)
        if "forward" in vars(module):
            return
        own = module.forward

        @functools.wraps(own)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            return _shifted(own(*arguments, **keywords))

        module.forward = forward
        subject.forwards.append(module)

    return way


def _own_forward(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    while subject.forwards:
        vars(subject.forwards.pop()).pop("forward", None)


# --- flags, autocast, dtype, config ----------------------------------------------------------------


def _train(pick: Callable[[Subject], torch.nn.Module], *, training: bool = True) -> Way:
    def way(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
        pick(subject).train(training)

    return way


def _autocast(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    if not subject.is_autocast:
        subject.ambient.enter_context(torch.autocast(DEVICE, dtype=torch.bfloat16))
        subject.is_autocast = True


def _no_autocast(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    subject.ambient.close()
    subject.is_autocast = False


def _to(dtype: torch.dtype) -> Way:
    def way(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
        subject.inner.to(dtype)
        subject.dtype = dtype

    return way


def _set_field(name: str, value: Any) -> Way:
    def way(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
        setattr(subject.inner.generation_config, name, value)
        subject.fields.add(name)

    return way


def _reset_fields(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    subject.reset_generation()


def _attention(name: str) -> Way:
    def way(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
        with contextlib.suppress(ValueError):  # not every model has every one
            subject.inner.set_attn_implementation(name)

    return way


def _threads(count: int) -> Way:
    def way(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
        torch.set_num_threads(count)

    return way


def _checkpointing(*, enabled: bool) -> Way:
    def way(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
        if enabled:
            subject.inner.gradient_checkpointing_enable()
        else:
            subject.inner.gradient_checkpointing_disable()

    return way


def _config_use_cache(subject: Subject, target: str, factor: float) -> None:  # noqa: ARG001
    subject.inner.config.use_cache = not subject.inner.config.use_cache


CHANGES: dict[str, dict[str, Way]] = {
    "weights": {
        "data.copy_": _data_copy,
        "data.mul_": _data_mul,
        "data =": _data_assign,
        "in place": _in_place,
        "moving average": _average,
        "foreach": _foreach,
        "vector_to_parameters": _vector,
        "numpy": _numpy,
        "state_dict()": _state_dict,
        "load_state_dict": _load,
        "load_state_dict(assign)": functools.partial(_load, assign=True),
        "new parameter": _new_parameter,
        "optimizer": _optimizer,
        "everything": _everything,
        "other module": _swap_module,
    },
    "partial": {
        "one row": _one_row,
        "one value": _one_value,
        "a third": _a_third,
        "a special token's row": _special_row,
    },
    "adapters": {
        "inject": _inject,
        "switch": _switch,
        "disable": _disable,
        "enable": _enable,
        "merge": _merge,
        "unmerge": _unmerge,
        "rescale": _rescale,
        "load": _reload,
    },
    "buffers": {
        "data.copy_": _buffer_data,
        "in place": _buffer_in_place,
        "assign": _buffer_assign,
        "register_buffer": _buffer_register,
    },
    "hooks": {
        "none": _unhook,
        "layer": _hook("layer", lambda s: s.layers[0].register_forward_hook(_steer)),
        "layer input": _hook("layer input", lambda s: s.layers[1].register_forward_pre_hook(_steer_input)),
        "projection": _hook(
            "projection", lambda s: s.layers[0].self_attn.k_proj.register_forward_hook(_steer)
        ),
        "attention": _hook(
            "attention",
            lambda s: s.layers[1].self_attn.register_forward_pre_hook(_steer_keywords, with_kwargs=True),
        ),
        "head": _hook("head", lambda s: s.inner.lm_head.register_forward_hook(_steer)),
        "embedding": _hook("embedding", lambda s: s.inner.model.embed_tokens.register_forward_hook(_steer)),
        "global": _hook(
            "global", lambda s: _global_hook(s, torch_module.register_module_forward_hook, _steer)
        ),
        "global input": _hook(
            "global input",
            lambda s: _global_hook(s, torch_module.register_module_forward_pre_hook, _steer_input),
        ),
        "observer": _hook("observer", lambda s: s.layers[0].register_forward_hook(lambda *_: None)),
    },
    "forwards": {
        "own": _own_forward,
        "mlp": _replace_forward(lambda s: s.layers[0].mlp),
        "projection": _replace_forward(lambda s: s.layers[0].mlp.up_proj),
        "norm": _replace_forward(lambda s: s.layers[1].input_layernorm),
        "attention": _replace_forward(lambda s: s.layers[0].self_attn),
    },
    "flags": {
        "eval": _train(lambda s: s.inner, training=False),
        "all": _train(lambda s: s.inner),
        "layer": _train(lambda s: s.layers[0]),
        "attention": _train(lambda s: s.layers[1].self_attn),
        "norm": _train(lambda s: s.inner.model.norm),
    },
    "autocast": {"off": _no_autocast, "bfloat16": _autocast},
    "dtype": {
        "float32": _to(torch.float32),
        "bfloat16": _to(torch.bfloat16),
        "float64": _to(torch.float64),
    },
    "config": {
        "reset": _reset_fields,
        **{f"{name}={value}": _set_field(name, value) for name, value in CONFIG_FIELDS},
        "config.use_cache": _config_use_cache,
    },
    "attention": {"sdpa": _attention("sdpa"), "eager": _attention("eager")},
    "threads": {"one": _threads(1), "two": _threads(2)},
    "checkpointing": {"off": _checkpointing(enabled=False), "on": _checkpointing(enabled=True)},
}


@contextlib.contextmanager
def ambient(name: str) -> Iterator[None]:
    """What a caller may hold around a single request."""
    contexts: dict[str, Callable[[], Any]] = {
        "": contextlib.nullcontext,
        "inference_mode": torch.inference_mode,
        "no_grad": torch.no_grad,
        "autocast": lambda: torch.autocast(DEVICE, dtype=torch.bfloat16),
    }
    with contexts[name]():
        yield
