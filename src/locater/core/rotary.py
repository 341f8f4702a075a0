"""Rotary position embeddings: pairs of a head's dimensions turned by position × frequency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from locater.errors import InputError

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True, eq=False)
class Rotary:
    """Which pairs of dimensions turn, and how fast.

    `half` pairs dimension k with k + n (Llama, GPT-NeoX), `interleaved` pairs 2k with 2k + 1
    (GPT-J); dimensions past 2n stay as they are (partial rotary).

    >>> rotary = Rotary(torch.tensor([torch.pi / 2]))
    >>> (
    ...     rotary.turn(torch.tensor([1.0, 0.0]), rotary.phases(torch.tensor(1))).round(decimals=4)
    ...     + 0.0
    ... )
    tensor([0., 1.])
    """

    frequencies: Float[Tensor, " pairs"]  # radians per token
    layout: Layout = "half"

    def __post_init__(self) -> None:
        if self.layout not in ("half", "interleaved"):
            raise InputError(
                f"unknown rotary layout {self.layout!r}.", hint="use 'half' or 'interleaved'."
            )
        if not bool(torch.isfinite(self.frequencies).all()):
            raise InputError(
                "rotary frequencies hold NaN or infinite values.",
                hint="they are base ** (-2k / dimensions), in radians per token.",
            )

    @classmethod
    def from_base(
        cls, dimensions: int, *, base: float = 10_000.0, layout: Layout = "half"
    ) -> Rotary:
        """Make the usual geometric frequencies base^(−2k/dimensions).

        >>> Rotary.from_base(4, base=100.0).frequencies
        tensor([1.0000, 0.1000], dtype=torch.float64)
        """
        steps = torch.arange(0, dimensions, 2, dtype=torch.float64)
        return cls(base ** (-steps / dimensions), layout)

    def phases(self, position: Tensor) -> Complex[Tensor, "*positions phases"]:
        """e^{i·position·frequency}; the last entry belongs to the dimensions that never turn."""
        angle = position[..., None] * torch.nn.functional.pad(self.frequencies, (0, 1))
        return torch.polar(torch.ones_like(angle), angle)

    def turn(
        self, vectors: Float[Tensor, "*batch head"], phases: Complex[Tensor, "*turns phases"]
    ) -> Float[Tensor, "*result head"]:
        """Multiply each pair of coordinates by its phase, the others by the last phase."""
        pairs = self.frequencies.shape[0]
        turned, rest = vectors[..., : 2 * pairs], vectors[..., 2 * pairs :]
        if self.layout == "half":
            first, second = turned[..., :pairs], turned[..., pairs:]
        else:
            first, second = turned[..., 0::2], turned[..., 1::2]
        cos, sin = phases[..., :-1].real, phases[..., :-1].imag
        first, second = first * cos - second * sin, first * sin + second * cos
        rest = rest * phases[..., -1:].real
        joined = (
            torch.cat((first, second), -1)
            if self.layout == "half"
            else torch.stack((first, second), -1).flatten(-2)
        )
        return torch.cat((joined, rest), -1)
