import math
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch

from locater import InputError, QKForm, Rotary, TokenProcess, propagation
from locater.core.score import HeadMoments, SampledHeads
from locater.core.theory import linearized_softmax, propagates


def example_form(seed: int, *, head: int = 4, model: int = 6) -> QKForm:
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 2, head, model, generator=generator, dtype=torch.float64)
    bias, key_bias = torch.randn(2, 2, head, generator=generator, dtype=torch.float64)
    return QKForm(
        query,
        key,
        2.0,
        query_bias=bias,
        key_bias=key_bias,
        rotary=Rotary.from_base(head),
        distance_bias=torch.randn(2, 9, generator=generator, dtype=torch.float64),
    )


def example_process(seed: int, *, tokens: int = 5, model: int = 6) -> TokenProcess:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(model, model, generator=generator, dtype=torch.float64)
    mean = torch.randn(tokens, model, generator=generator, dtype=torch.float64)
    process = TokenProcess.autoregressive(tokens, 0.6, covariance=root @ root.mT / model)
    return replace(process, mean=mean)


def test_the_moments_are_those_of_the_projected_samples() -> None:
    form, process = example_form(0), example_process(1)
    tokens = process.sample(50, generator=torch.Generator().manual_seed(2))
    heads = SampledHeads.of(form, tokens)
    score = heads.score()
    ours = linearized_softmax(heads.logits())  # samples, heads, tokens
    # E[b·q] = E b · E q + tr Cov(b, q); the sample's own covariance divides by n, ours by n − 1
    assert score.key_mean is not None and score.query_mean is not None
    apart = (score.key_mean * score.query_mean[:, None]).sum(-1) / form.temperature + score.base
    together = score.moments()[0] - apart
    torch.testing.assert_close(ours.mean(0) - apart, together * (50 - 1) / 50)


def test_logits_are_those_of_the_definition() -> None:
    form = example_form(3)
    tokens = example_process(4).sample(3, generator=torch.Generator().manual_seed(0))
    logits = SampledHeads.of(form, tokens).logits()
    assert form.rotary is not None and form.query_bias is not None and form.key_bias is not None
    assert form.distance_bias is not None
    for head in range(2):
        for place in range(5):
            query = form.query[head] @ tokens[0, -1] + form.query_bias[head]
            key = form.key[head] @ tokens[0, place] + form.key_bias[head]
            query = form.rotary.turn(query, form.rotary.phases(torch.tensor(7.0 + 4)))
            key = form.rotary.turn(key, form.rotary.phases(torch.tensor(7.0 + place)))
            expected = query @ key / 2 + form.distance_bias[head, 4 - place]
            torch.testing.assert_close(logits[0, head, place], expected)


@pytest.mark.statistical
def test_many_samples_of_a_kronecker_process_have_its_moments(seed: int) -> None:
    form, process = example_form(0), example_process(1)
    count = 20_000
    tokens = process.sample(count, generator=torch.Generator().manual_seed(seed))
    mean, variance = HeadMoments.of(form, process).score().moments()
    ours, ours_variance = SampledHeads.of(form, tokens).score().moments()
    limit = NormalDist().inv_cdf(1 - 1e-6 / (2 * mean.numel()))
    # the sampled mean is an average of scores, up to 1/n
    assert ((ours - mean).abs() < limit * (variance / count).sqrt() * (1 + 1 / count)).all()
    # a product's variance from estimated moments is no noisier than that of the products' squares
    # with the kurtosis of a product of Gaussians, at most 6 above the Gaussian's 2
    spread = variance * math.sqrt(8 / count)
    assert ((ours_variance - variance).abs() < limit * spread).all()
    plain, _ = SampledHeads.of(replace(form, rotary=None), tokens).score().moments()
    assert ((plain - mean).abs() > limit * (variance / count).sqrt()).any()


@pytest.mark.statistical
def test_given_gaussian_queries_the_law_is_the_exact_one(seed: int) -> None:
    form, process = example_form(0), example_process(1)
    count = 20_000
    tokens = process.sample(count, generator=torch.Generator().manual_seed(seed))
    heads = SampledHeads.of(form, tokens)
    exact = propagation(form, process).rho
    # averaging a probability over as many queries is at least as sure as counting
    error = (exact * (1 - exact) / count).sqrt()
    limit = NormalDist().inv_cdf(1 - 1e-6 / (2 * exact.numel()))
    assert ((heads.rho_given_query() - exact).abs() < limit * error).all()
    gaussian = propagation(form, process, method="gaussian").rho
    assert ((gaussian - exact).abs() > limit * error).any()  # the test can tell laws apart


@pytest.mark.statistical
def test_queries_of_another_law_are_taken_as_they_are(seed: int) -> None:
    """Half of the queries are silent: no Gaussian has the two levels of ρ that follow."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 4000, 4, 3, generator=generator, dtype=torch.float64)
    loud = torch.zeros(1, 4000, 3, dtype=torch.float64)
    loud[:, ::2] = 30.0
    heads = SampledHeads(loud, keys, 1.0)
    measured = propagates(heads.logits()).double().mean(0)
    error = (measured * (1 - measured) / 4000).sqrt()
    limit = NormalDist().inv_cdf(1 - 1e-6 / 8)
    assert ((heads.rho_given_query() - measured).abs() < limit * error).all()
    assert ((heads.score().law().between(0.0, 1.0) - measured).abs() > limit * error).any()
    drawn = heads.sample_logits(4000, generator, given_query=True)
    share = (drawn.abs().amax(-1) == 0).double().mean().item()
    assert share == pytest.approx(0.5, abs=limit * math.sqrt(0.25 / 4000))


@pytest.mark.statistical
def test_drawn_logits_have_the_sampled_moments(seed: int) -> None:
    form, process = example_form(5), example_process(6)
    tokens = process.sample(40, generator=torch.Generator().manual_seed(7))
    heads = SampledHeads.of(form, tokens)
    mean, variance = heads.score().moments()
    draws = 20_000
    drawn = linearized_softmax(heads.sample_logits(draws, torch.Generator().manual_seed(seed)))
    limit = NormalDist().inv_cdf(1 - 1e-6 / (4 * mean.numel()))
    assert ((drawn.mean(0) - mean).abs() < limit * (variance / draws).sqrt()).all()
    centered = (drawn - drawn.mean(0)).square()
    error = centered.std(0) / math.sqrt(draws)
    assert ((centered.mean(0) - variance).abs() < limit * error).all()


def test_samples_of_another_width_are_refused() -> None:
    with pytest.raises(InputError, match="form of 6 dimensions"):
        SampledHeads.of(example_form(0), torch.zeros(10, 5, 3))
