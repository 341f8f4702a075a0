"""Tiny random models of every model type of transformers, the same on every machine."""

from __future__ import annotations

import importlib
import inspect
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.coverage.exceptions import CLASSES, SETTINGS, VARIANTS
from tests.coverage.shrink import Shrinker
from torch import nn


def model_types() -> list[str]:
    """Every model type of the installed transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


@dataclass(frozen=True)
class Family:
    """A model type, or one of its variants."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = ""


def resolved(family: str) -> Family:
    """What a family's name stands for: `gpt2`, `gpt2, unscaled`, `gpt2 as GPT2LMHeadModel`."""
    if family in VARIANTS:
        return Family(*VARIANTS[family])
    model_type, _, architecture = family.partition(" as ")
    return Family(model_type, architecture=architecture)


def families() -> list[str]:
    """Every family to put to the test."""
    return [*model_types(), *VARIANTS, *heads()]


def heads() -> list[str]:
    """The classes that people save, where they are not those without a head."""
    from transformers.models.auto import modeling_auto

    found: dict[str, None] = {}
    for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        table = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for model_type, name in table.items():
            if name != modeling_auto.MODEL_MAPPING_NAMES.get(model_type):
                found[f"{model_type} as {name}"] = None
    return sorted(found)


def tiny_config(family: str) -> Any:
    """The default config of a family, shrunk."""
    import transformers

    known = resolved(family)
    chosen = transformers.CONFIG_MAPPING[known.model_type]
    first = SETTINGS.get(known.model_type, {}).get("__default__", {})
    table = {
        name: {k: v for k, v in one.items() if k != "__default__"} for name, one in SETTINGS.items()
    }
    config = chosen(**Shrinker(table).settings(chosen(**first), known.settings))
    for part in (config, *_parts(config)):
        part._experts_implementation = "eager"  # the others know no float64
        if getattr(part, "use_cache", None):
            part.use_cache = False
    return config


def _parts(config: Any) -> Iterator[Any]:
    import transformers

    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            yield value
            yield from _parts(value)


def model_class(family: str, config: Any) -> Any:
    """The class to build: the model without a head, else with one, else what takes the config."""
    import transformers
    from transformers.models.auto import modeling_auto

    known = resolved(family)
    model_type = known.model_type
    if known.architecture:
        return _named(known.architecture, config)
    if model_type in CLASSES:
        return _named(CLASSES[model_type], config)
    others = sorted(name for name in dir(modeling_auto) if name.startswith("MODEL_FOR_"))
    tables = ["MODEL_MAPPING_NAMES", *(name for name in others if name.endswith("_NAMES"))]
    for table in tables:
        name = getattr(modeling_auto, table).get(model_type)
        if name:
            return _named(name if isinstance(name, str) else name[0], config)
    module = _modeling(config)
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, transformers.PreTrainedModel)
        and value.config_class is type(config)
        and not value.__name__.endswith("PreTrainedModel")
    ]
    return min(found, key=lambda one: ("For" in one.__name__, len(one.__name__)), default=None)


def _modeling(config: Any) -> Any:
    name = type(config).__module__.replace("configuration_", "modeling_")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return importlib.import_module(type(config).__module__)


def _named(name: str, config: Any) -> Any:
    import transformers

    found = getattr(transformers, name, None)
    return found if found is not None else getattr(_modeling(config), name)


def size_of(chosen: Any, config: Any) -> int:
    """How many parameters a model would have."""
    with torch.device("meta"):
        model = chosen._from_config(_own(chosen, config))
    return sum(one.numel() for one in model.parameters())


def _own(chosen: Any, config: Any) -> Any:
    """The part of a composite config that a class takes, where it does not take the whole."""
    if isinstance(config, chosen.config_class):
        return config
    return next((one for one in _parts(config) if isinstance(one, chosen.config_class)), config)


def built(chosen: Any, config: Any, implementation: str = "eager") -> nn.Module:
    """A tiny model in evaluation mode, every parameter drawn anew."""
    config = _own(chosen, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = chosen._from_config(config, attn_implementation=implementation)
    return shaken(model.eval())


@torch.no_grad()
def shaken(model: nn.Module) -> nn.Module:
    """Give every parameter a value of its own, by its name: no bias is zero, no gain is one."""
    done: set[int] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) not in done and parameter.requires_grad:  # else it is a fixed table
            done.add(id(parameter))
            parameter.copy_(_drawn(name, parameter, model))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(0.3 * _normal(name, buffer.shape))
        elif name.endswith("running_var"):
            buffer.copy_(1 + 0.3 * _normal(name, buffer.shape).tanh())
    return model


def _normal(name: str, shape: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _drawn(name: str, parameter: nn.Parameter, model: nn.Module) -> torch.Tensor:
    drawn = _normal(name, parameter.shape)
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding):
        return drawn
    if parameter.ndim < 2 or not parameter.numel():
        is_gain = name.endswith(("weight", "gamma"))
        return 0.4 * drawn + (1.0 if is_gain else 0.0)
    fan_in = parameter[0].numel() if not isinstance(owner, nn.Embedding) else 1
    if parameter.ndim == 3 and not isinstance(
        owner, nn.Conv1d
    ):  # stacked experts, or a table of tokens (1, tokens, width)
        fan_in = parameter.shape[-1] if parameter.shape[0] > 1 else 1
    return drawn / max(fan_in, 1) ** 0.5
