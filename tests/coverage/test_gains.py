"""The measurement of a norm's gains sees wrong gains and a norm in another place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.coverage import doors
from tests.coverage.compare import Rows, pairings
from tests.coverage.drive import Drive
from tests.coverage.gains import heard, misread
from tests.coverage.tiny import shaken
from tests.coverage.truth import traced
from torch import Tensor, nn


class PlusOne(nn.RMSNorm):
    """Gemma's."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply with 1 + weight."""
        return nn.functional.rms_norm(inputs, inputs.shape[-1:]) * (1 + self.weight)


class Attention(nn.Module):
    """Two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        """Mix tokens."""
        query, key = (
            one(inputs).unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.q_proj, self.k_proj)
        )
        return (torch.softmax(query @ key.mT / 2, -1) @ key).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """An attention with a norm before it, or behind it."""

    def __init__(self, model_type: str, norm: type[nn.Module], is_before: bool) -> None:
        super().__init__()
        self.config = {"model_type": model_type, "num_attention_heads": 2, "head_dim": 4}
        self.self_attn, self.input_layernorm = Attention(), norm(8)
        self.is_before = is_before

    def forward(self, inputs: Tensor) -> Tensor:
        """Attend."""
        if self.is_before:
            return self.self_attn(self.input_layernorm(inputs))
        return self.input_layernorm(self.self_attn(inputs))


@pytest.mark.parametrize(
    ("model_type", "norm", "is_before", "wrong"),
    [
        ("llama", nn.RMSNorm, True, ""),
        ("llama", nn.LayerNorm, True, ""),
        ("gemma", PlusOne, True, ""),
        ("llama", PlusOne, True, "its gains are off by 1"),
        ("gemma", nn.RMSNorm, True, "its gains are off by 1"),
        ("llama", nn.RMSNorm, False, "queries do not read what it makes"),
    ],
)
def test_a_wrong_gain_and_a_wrong_place_are_seen(
    model_type: str, norm: type[nn.Module], is_before: bool, wrong: str
) -> None:
    model = shaken(Block(model_type, norm, is_before).double())
    inputs = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with traced(model) as run:
        model(inputs)
    (told,), rows = doors.live(model).told, Rows(model)
    pairs = pairings(run.attentions, rows.owner(told.query_rows), rows.owner(told.key_rows))
    norms = heard(model, [Drive("", model, {"inputs": inputs}, run)], [told.norm])
    assert told.norm == "input_layernorm" and pairs
    assert misread(model, told, pairs, norms[told.norm]) == wrong
    if told.shift is not None:
        told = replace(told, shift=None)
        assert "its bias" in misread(model, told, pairs, norms[told.norm])
