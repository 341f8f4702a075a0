"""The tracer finds attention by what it does, and the comparison has teeth."""

from __future__ import annotations

import math

import torch
from tests.coverage.compare import Rows, best_fit, controls, pairings
from tests.coverage.doors import live
from tests.coverage.truth import traced
from torch import Tensor, nn


class Odd(nn.Module):
    """Attention and a router, with names that say nothing."""

    def __init__(self, heads: int = 2, width: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.alpha, self.beta = nn.Linear(width, width), nn.Linear(width, width)
        self.gate = nn.Linear(width, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Mix tokens, then gate them."""
        split = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in (self.alpha(inputs), self.beta(inputs))
        )
        query, key = split
        weights = torch.softmax(query @ key.mT / 2, -1)
        mixed = (weights @ key).transpose(1, 2).flatten(2)
        return mixed * self.gate(inputs).softmax(-1).amax(-1, keepdim=True)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_attention_is_found_by_what_it_does_and_a_router_is_not() -> None:
    model = Odd().double()
    with traced(model) as heard:
        model(randn(2, 5, 8))
    (attention,) = heard.attentions
    (score,) = attention.scores
    assert score.left.weights == {"alpha.weight"} and score.right.weights == {"beta.weight"}
    assert score.left.parameters == {"alpha.bias"}
    assert attention.logits.shape == (2, 2, 5, 5) and heard.others == [""]


def test_what_is_done_to_queries_and_scores_is_known() -> None:
    class Normed(Odd):
        def forward(self, inputs: Tensor) -> Tensor:
            query, key = self.alpha(inputs), nn.functional.normalize(self.beta(inputs), dim=-1)
            return (10 * torch.tanh(query @ key.mT / 10)).softmax(-1) @ key

    model = Normed().double()
    with traced(model) as heard:
        model(randn(2, 5, 8))
    (attention,) = heard.attentions
    (score,) = attention.scores
    assert "tanh" in attention.steps
    assert "linalg_vector_norm" in score.right.steps and not score.left.steps


def test_a_form_fits_its_own_softmax_and_no_control_does() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=place) / parameter.shape[-1] ** 0.5)
    with traced(model) as heard:
        model(randn(2, 7, 16))
    told, rows = live(model).told, Rows(model)
    assert len(told) == len(heard.attentions) == 2
    for one in told:
        query, key = rows.owner(one.query_rows), rows.owner(one.key_rows)
        (pairing,) = pairings(heard.attentions, query, key)
        fit = best_fit(one, pairing)
        assert fit.gap < 1e-12 and fit.lined is not None
        wrong = controls(one, told, fit.lined)
        assert {"temperature × 1.1", "another layer", "permuted heads"} <= wrong.keys()
        assert all(value > 0.05 for value in wrong.values())


def test_logits_that_do_not_vary_say_nothing() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    with traced(model) as heard:
        model(*[torch.ones(1, 4, 8, dtype=torch.float64)] * 3)
    (told,) = live(model).told
    rows = Rows(model)
    (pairing,) = pairings(heard.attentions, rows.owner(told.query_rows), rows.owner(told.key_rows))
    assert math.isnan(best_fit(told, pairing).gap)
