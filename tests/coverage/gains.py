"""Whether the gains of the norm before an attention are those that the model itself applies.

MATH: a vector u of mean zero and variance one is its own normalization, with or without its mean
taken out, so a norm makes gain · u + shift of it, and −gain · u + shift of −u.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.coverage.compare import Pairing
from tests.coverage.doors import Told
from tests.coverage.drive import Drive
from torch import Tensor, nn

LARGE = 1e3
"""How large u is given: an epsilon of 1e-3 changes the variance by 1e-9 then, a gain by half."""
ROUNDING = 1e-5
"""Relative: some norms compute in float32, with 6e-8 at each of about a hundred operations."""
ROWS = 256


@dataclass
class Run:
    """What a norm made each time that it ran, and what it was given last."""

    made: list[Tensor] = field(default_factory=list)
    given: tuple[Any, ...] = ()


def heard(model: nn.Module, drives: Iterable[Drive], names: Iterable[str]) -> dict[str, Run]:
    """Run the model once more and keep what these norms make."""
    runs = {name: Run() for name in names}

    def listen(run: Run, given: tuple[Any, ...], made: Tensor) -> None:
        run.made.append(made.detach())
        run.given = given

    with ExitStack() as stack, torch.no_grad():
        for name, run in runs.items():
            weight = model.get_submodule(name).weight
            for norm in model.modules():  # several may share it
                if getattr(norm, "weight", None) is weight:
                    hook = norm.register_forward_hook(
                        lambda _, *heard, run=run: listen(run, *heard)
                    )
                    stack.callback(hook.remove)
        for drive in drives:
            drive.run(model)
    return runs


@torch.no_grad()
def measured(norm: nn.Module, run: Run, width: int) -> tuple[Tensor, Tensor]:
    """What a norm multiplies each dimension with, and what it adds to it."""
    first, *others = run.given
    unit = torch.ones(width, dtype=torch.float64)
    unit[::2] = -1
    unit = (unit - unit.mean()) / unit.std(correction=0)
    plus, minus = (
        norm((size * unit).to(first).expand(first.shape), *others).double().flatten(0, -2)[0]
        for size in (LARGE, -LARGE)
    )
    return (plus - minus) / (2 * unit), (plus + minus) / 2


def misread(model: nn.Module, told: Told, pairs: Iterable[Pairing], run: Run) -> str:
    """In what the norm before an attention is not what is told of it; empty where it is."""
    assert told.gain is not None
    width = len(told.gain)
    if not run.made:
        return "it did not run"
    made = torch.cat([one.double().flatten(0, -2) for one in run.made])
    for pairing in pairs:
        for side, read in (("queries", pairing.query), ("keys", pairing.key)):
            given = read.given.movedim(1, -1) if read.is_picture else read.given
            rows = given.double().flatten(0, -2)[:ROWS]
            rows = rows[rows.abs().amax(-1) > 0]  # windows are filled up with zeros
            if rows.shape[-1] != width or not _among(rows, made):
                return f"{side} do not read what it makes"
    gain, shift = measured(model.get_submodule(told.norm), run, width)
    said = torch.zeros_like(shift) if told.shift is None else told.shift
    for words, mine, theirs in (("gains", told.gain, gain), ("bias", said, shift)):
        gap = (mine - theirs).abs().max().item()
        if not gap < ROUNDING * (1 + gain.abs().max().item()):
            return f"its {words} are off by {gap:.2g}"
    return ""


def _among(rows: Tensor, made: Tensor) -> bool:
    """Whether every row is one of those that were made."""
    gap = torch.cdist(rows, made, compute_mode="donot_use_mm_for_euclid_dist").amin(-1)
    return bool((gap <= ROUNDING * made.abs().max()).all())
