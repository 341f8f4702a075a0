"""Running a tiny model, whole or in parts, until every attention of it has run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.coverage.exceptions import INPUTS, PARTS, SINGLES
from tests.coverage.inputs import BATCH, cast, guesses, normal, setting
from tests.coverage.truth import Heard, traced
from torch import nn


@dataclass(frozen=True, eq=False)
class Drive:
    """A part of a model, and inputs that it takes."""

    name: str
    module: nn.Module
    given: dict[str, Any]
    heard: Heard

    def run(self, module: nn.Module) -> None:
        """Run this part of a model of the same kind."""
        part = module.get_submodule(self.name) if self.name else module
        _run(part, self.given)


@dataclass
class Driven:
    """What ran, and what was tried in vain."""

    drives: list[Drive] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def attentions(self) -> list[Any]:
        """Everything heard."""
        return [one for drive in self.drives for one in drive.heard.attentions]

    @property
    def others(self) -> list[str]:
        """Softmaxes over something else."""
        return sorted({one for drive in self.drives for one in drive.heard.others})


def _run(part: nn.Module, given: dict[str, Any]) -> None:
    """Run a part with the same random numbers each time: some models draw their masks."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        part(**cast(given, next(part.parameters()).dtype))


def driven(model: nn.Module, model_type: str) -> Driven:
    """Run the model, then those of its parts that stood still."""
    result = Driven()
    first = _drive(model, "", model, model_type, result.errors)
    result.drives += first
    for name, part in _parts(model):
        ran = {one.module for one in result.attentions}
        own = getattr(part.config, "model_type", "")
        stood_still = not any(one == name or one.startswith(f"{name}.") for one in ran)
        if stood_still or (own != model_type and own in INPUTS):
            errors: list[str] = []
            for drive in _drive(model, name, part, own, errors):
                if {one.module for one in drive.heard.attentions} - ran:
                    result.drives.append(drive)
            result.errors += errors[:2]
    for name, part in model.named_modules():
        if type(part).__name__ in PARTS:
            result.drives += _drive(model, name, part, model_type, result.errors)
    return result


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    import transformers

    for name, part in model.named_modules():
        if name and isinstance(part, transformers.PreTrainedModel):
            yield name, part


def _drive(
    model: nn.Module, name: str, part: Any, model_type: str, errors: list[str]
) -> list[Drive]:
    """The first guess at its inputs that a part takes; or every one that a table gives."""
    kind = type(part).__name__
    table = PARTS.get(kind) or INPUTS.get((model_type, kind)) or INPUTS.get(model_type)
    config, found = getattr(part, "config", model.config), []
    for given in table(config) if table else guesses(part, config):
        try:
            with traced(model) as heard:
                _run(part, given)
            found.append(Drive(name, part, given, heard))
            if not table:
                found += _crossed(model, found[0])
                break
        except (TimeoutError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  # models raise whatever they like
            words = f"{name or 'the model'} on {', '.join(given)}: {type(error).__name__}: {error}"
            errors.append(words[:220])
    return found


def _crossed(model: nn.Module, drive: Drive) -> list[Drive]:
    """The same with an encoder's tokens, where that wakes more attentions."""
    part: Any = drive.module
    known = inspect.signature(part.forward).parameters
    names = [one for one in ("encoder_hidden_states", "encoder_outputs") if one in known]
    if not names or names[0] in drive.given or "decoder_input_ids" in known:
        return []
    config, name = part.config, names[0]
    width = setting(
        config, "cross_attention_hidden_size", "encoder_hidden_size", "hidden_size", "d_model"
    )
    tokens = normal(BATCH, 7, width or 32, seed=6)
    given = {**drive.given, name: tokens if name == "encoder_hidden_states" else (tokens,)}
    try:
        with traced(model) as heard:
            _run(part, given)
    except (TimeoutError, MemoryError):
        raise
    except Exception:  # noqa: BLE001
        return []
    more = len(heard.attentions) > len(drive.heard.attentions)
    return [Drive(drive.name, part, given, heard)] if more else []


def in_doubles(model: nn.Module, model_type: str) -> Driven:
    """Run in float64, else in float32 where a model does not know it, or its masks overflow."""
    result = Driven() if model_type in SINGLES else driven(model.double(), model_type)
    if result.drives and result.attentions:
        return result
    with torch.no_grad():
        again = driven(model.float(), model_type)
    return again if again.drives or not result.errors else result
