"""Rotary turns are multiplications by dense rotation matrices, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locater import ConfigError, InputError, Rotary
from locater.core.form import Layout

LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")


def rotation(rotary: Rotary, head: int, position: int) -> Tensor:
    """The head × head matrix that turns a vector at a position, written out."""
    matrix = torch.eye(head, dtype=torch.float64)
    pairs = len(rotary.frequencies)
    for k, frequency in enumerate(rotary.frequencies.tolist()):
        first, second = (k, k + pairs) if rotary.layout == "half" else (2 * k, 2 * k + 1)
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        matrix[first, first] = matrix[second, second] = cos
        matrix[first, second], matrix[second, first] = -sin, sin
    return matrix


def draw(pairs: int, rest: int, layout: Layout, seed: int, count: int) -> tuple[Rotary, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    frequencies = torch.randn(pairs, generator=generator, dtype=torch.float64)
    vectors = torch.randn(count, 2 * pairs + rest, generator=generator, dtype=torch.float64)
    return Rotary(frequencies, layout), vectors


@given(
    pairs=st.integers(1, 4),
    rest=st.integers(0, 3),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)
def test_a_turn_is_the_dense_rotation_of_every_position(
    pairs: int, rest: int, layout: Layout, seed: int
) -> None:
    rotary, vectors = draw(pairs, rest, layout, seed, count=6)
    positions = torch.arange(-2, 4)
    turned = rotary.turn(vectors, rotary.phases(positions))
    for vector, result, position in zip(vectors, turned, positions.tolist(), strict=True):
        dense = rotation(rotary, 2 * pairs + rest, position)
        torch.testing.assert_close(result, dense @ vector)
    torch.testing.assert_close(turned.norm(dim=-1), vectors.norm(dim=-1))


@given(
    pairs=st.integers(1, 4),
    rest=st.integers(0, 3),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
    shift=st.integers(0, 1000),
)
def test_products_of_turned_vectors_depend_on_the_distance_alone(
    pairs: int, rest: int, layout: Layout, seed: int, shift: int
) -> None:
    rotary, (query, key) = draw(pairs, rest, layout, seed, count=2)

    def product(query_at: int, key_at: int) -> Tensor:
        phases = rotary.phases(torch.tensor([query_at, key_at]))
        return rotary.turn(query, phases[0]) @ rotary.turn(key, phases[1])

    torch.testing.assert_close(product(7 + shift, 3 + shift), product(7, 3), rtol=0, atol=1e-10)


def test_the_two_layouts_differ_by_a_permutation_of_the_dimensions() -> None:
    half, vectors = draw(2, 1, "half", seed=5, count=3)
    order = torch.tensor([0, 2, 1, 3, 4])  # half (0, 2), (1, 3) -> interleaved (0, 1), (2, 3)
    phases = half.phases(torch.tensor([1, 2, 3]))
    interleaved = Rotary(half.frequencies, "interleaved")
    turned = interleaved.turn(vectors[:, order], phases)
    torch.testing.assert_close(turned, half.turn(vectors, phases)[:, order])
    assert not torch.allclose(turned, half.turn(vectors[:, order], phases))


def test_the_usual_frequencies_are_a_geometric_sequence() -> None:
    rotary = Rotary.from_base(8, base=10_000.0, layout="interleaved")
    expected = torch.tensor([1, 1e-1, 1e-2, 1e-3], dtype=torch.float64)
    torch.testing.assert_close(rotary.frequencies, expected)
    assert rotary.layout == "interleaved"


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_layout_is_refused() -> None:
    match = r"unknown rotary layout 'spiral'.\nhint: choose one of: half, interleaved."
    with pytest.raises(ConfigError, match=match):
        Rotary(torch.ones(1), "spiral")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_frequencies_that_are_not_numbers_are_refused(value: float) -> None:
    with pytest.raises(InputError, match=r"frequencies hold NaN or infinite(.|\n)*radians per"):
        Rotary(torch.tensor([1.0, value]))
