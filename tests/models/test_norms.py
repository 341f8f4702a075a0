"""Norms between projection and product, taken at their root mean square: how far that goes.

MATH: for Gaussian tokens ‖y‖ concentrates, and what a form leaves out is of the size of its
relative deviation.  The truth is the normalized attention itself, sampled.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from locater import QKForm, TokenProcess, propagation
from locater.core.form import HeadNorm, Rotary
from locater.core.score import HeadMoments, LogitDraws, SampledHeads
from locater.core.theory import attention_entropy, predicted_attention
from locater.models.live import find_attention
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.train import load_trained, train

MODEL, HEAD, TOKENS, COUNT = 96, 48, 24, 2_000


def normed(seed: int = 0) -> QKForm:
    """Two heads with gains and RMS norms, at the root mean square for Σ = I."""
    generator = torch.Generator().manual_seed(seed)
    sides, norms = [], []
    shared = torch.randn(2, HEAD, MODEL, generator=generator, dtype=torch.float64)
    for _ in range(2):
        own = torch.randn(2, HEAD, MODEL, generator=generator, dtype=torch.float64)
        rows = (shared + own) / math.sqrt(MODEL)
        gain = 0.5 + 2 * torch.rand(2, HEAD, 1, generator=generator, dtype=torch.float64)
        norm = HeadNorm(rows, torch.ones(2))
        size = norm.mean_square().sqrt()
        norms.append(replace(norm, size=size))
        sides.append(rows * gain * math.sqrt(HEAD) / size[:, None, None])
    return QKForm(*sides, math.sqrt(HEAD), query_norm=norms[0], key_norm=norms[1])


def colored(seed: int = 1) -> Tensor:
    """A covariance whose eigenvalues span a factor of ten."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(MODEL, MODEL, generator=generator, dtype=torch.float64))
    return basis * torch.logspace(-0.5, 0.5, MODEL, dtype=torch.float64) @ basis.mT


def sampled(process: TokenProcess, count: int, seed: int = 2) -> Tensor:
    """Sequences of the process."""
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(count, TOKENS, MODEL, generator=generator, dtype=torch.float64)
    assert process.covariance is not None
    rooted = white @ torch.linalg.cholesky(process.covariance).mT
    return torch.linalg.cholesky(process.kernel) @ rooted


def true_logits(form: QKForm, tokens: Tensor) -> Tensor:
    """(samples, heads, tokens): last queries on all keys, each divided by its own norm."""
    sides = []
    for factor, norm in ((form.query, form.query_norm), (form.key, form.key_norm)):
        assert norm is not None
        gain = factor * (norm.size[:, None, None] / math.sqrt(HEAD))  # diag(g) W
        raw = torch.einsum("ntm,hdm->nhtd", tokens, norm.rows)
        length = raw.norm(dim=-1, keepdim=True) / math.sqrt(HEAD)
        sides.append(torch.einsum("ntm,hdm->nhtd", tokens, gain) / length)
    query, key = sides
    return (query[:, :, -1:] @ key.mT)[:, :, 0] / form.temperature


def gate(logits: Tensor) -> Tensor:
    """ρ of samples, by Definition 1: how often 0 ≤ (ω_i − mean ω + 1)/T ≤ 1."""
    score = (1 + logits - logits.mean(-1, keepdim=True)) / TOKENS
    return ((score >= 0) & (score <= 1)).double().mean(0)


@pytest.mark.statistical
def test_the_deviation_is_how_far_the_norm_strays() -> None:
    form, covariance = normed(), colored()
    assert form.query_norm is not None
    process = replace(TokenProcess.named("independent", TOKENS), covariance=covariance)
    rows = sampled(process, COUNT).flatten(0, 1)
    length = torch.einsum("nm,hdm->nhd", rows, form.query_norm.rows).norm(dim=-1)
    expected = form.query_norm.deviation(covariance)
    strays = length.std(0) / length.square().mean(0).sqrt()
    assert torch.allclose(strays, expected, rtol=0.05)
    assert torch.allclose(
        length.square().mean(0), form.query_norm.mean_square(covariance), rtol=0.01
    )


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["autoregressive", "unit-walk", "random-walk"])
def test_rho_of_normalized_attention_follows_from_the_form(name: str) -> None:
    """What is left out is of the second order in the norm's deviation; growing tokens included."""
    form, covariance = normed(), colored()
    assert form.query_norm is not None and form.key_norm is not None
    process = replace(TokenProcess.named(name, TOKENS), covariance=covariance)
    tokens = sampled(process, COUNT)
    logits = true_logits(form, tokens)
    error = (propagation(form, process).rho - gate(logits)).abs()
    strays = max(one.deviation(covariance).max() for one in (form.query_norm, form.key_norm))
    noise = 0.5 / math.sqrt(COUNT)
    assert 0.1 < strays < 0.2
    assert error.mean() < noise + strays**2 / 2
    assert error.max() < 4 * noise + strays**2
    assert torch.allclose(SampledHeads.of(form, tokens).logits(), logits, atol=1e-10)


@pytest.mark.statistical
def test_drawn_rows_of_growing_tokens_have_the_covariance_of_the_law(seed: int) -> None:
    """Norms take the growth out of what is drawn as well: the first tokens are as loud as the last.

    Six standard errors of the sample: 1 false alarm in 10⁷ for 48 variances.  Resolution: 15 %;
    with the noise of the walk itself they are off many times.
    """
    form, generator = normed(), torch.Generator().manual_seed(seed)
    process = TokenProcess.random_walk(TOKENS, covariance=colored())
    moments = HeadMoments.of(form, process)
    draws = LogitDraws.of(process, 4_000, generator)
    rows = torch.cat(list(draws.rows(moments, generator)))
    squares = (rows - rows.mean(1, keepdim=True)).square()
    wanted = moments.logits()[1].diagonal(dim1=-2, dim2=-1)
    error = squares.std(1) / math.sqrt(4_000)
    assert ((squares.mean(1) - wanted).abs() < 6 * error).all()


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("start", [0, 12])
def test_moving_means_and_biases_are_in_every_tokens_own_norm(turns: bool, start: int) -> None:
    """Against keys written out: token by token, each over its own root mean square."""
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    form, tokens = normed(), 7
    bias, shift = draw(2, 2, HEAD), draw(2, HEAD)
    assert form.query_norm is not None and form.key_norm is not None
    rotary = Rotary.from_base(12, base=50.0) if turns else None
    norms = [replace(form.query_norm, bias=bias[0], eps=1e-3),
             replace(form.key_norm, bias=bias[1], shift=shift, start=start)]  # fmt: skip
    form = replace(form, query_bias=bias[0], key_bias=bias[1] + shift, rotary=rotary,
                   query_norm=norms[0], key_norm=norms[1])  # fmt: skip
    steps = torch.linspace(0.5, 2, tokens, dtype=torch.float64)
    kernel = 0.6 ** (steps[:, None] - steps).abs() * steps.sqrt() * steps.sqrt()[:, None]
    process = TokenProcess(kernel, colored(), draw(tokens, MODEL) * steps[:, None])
    assert process.mean is not None
    mean, covariance = process.mean, colored()
    places = torch.arange(1 - tokens, 1, dtype=torch.float64)
    for head in range(2):
        made = []
        for norm, factor in zip(norms, (form.query, form.key), strict=True):
            rows, own = norm.rows[head], bias[len(made), head]
            moved = mean @ rows.T + own  # E‖W x + b‖² with its uncentred moment, by the trace
            second = kernel.diagonal() * torch.trace(rows @ covariance @ rows.T)
            rms = (second + moved.square().sum(1) + norm.eps * HEAD).sqrt()
            ratio = norm.size[head] / rms[:, None, None]
            scaled = torch.where((torch.arange(HEAD) >= norm.start)[:, None], ratio, 1.0)
            weights = factor[head] * scaled
            offset = own * scaled[..., 0] + (shift[head] if len(made) else 0)
            made.append((weights, offset))
        (query, asked), (keys, answered) = (made[0][0][-1], made[0][1][-1]), made[1]
        phases = None if rotary is None else rotary.phases(places)
        if rotary is not None and phases is not None:
            keys = rotary.turn(keys.mT, phases[:, None]).mT
            answered = rotary.turn(answered, phases)
        # logits (A_t x_t + a_t)·(Q x_T + q): Isserlis, with everything written out
        centre, ask = (keys @ mean[..., None])[..., 0] + answered, query @ mean[-1] + asked
        cross = keys @ covariance @ query.T
        first = kernel[:, -1] * torch.einsum("taa->t", cross) + centre @ ask
        both = torch.einsum("tam,mn,sbn->tsab", keys, covariance, keys) * kernel[..., None, None]
        own = kernel[-1, -1] * query @ covariance @ query.T
        linked = kernel[:, -1, None, None] * cross
        second = (
            torch.einsum("tsab,ab->ts", both, own)
            + torch.einsum("tab,sba->ts", linked, linked)
            + torch.einsum("tsab,a,b->ts", both, ask, ask)
            + centre @ own @ centre.T
            + (mixed := torch.einsum("a,tab,sb->ts", ask, linked, centre))
            + mixed.T
        )
        found = HeadMoments.of(form, process).logits()
        centred = torch.eye(tokens, dtype=torch.float64) - 1 / tokens
        torch.testing.assert_close(centred @ found[0][head], centred @ first / form.temperature)
        torch.testing.assert_close(
            centred @ found[1][head] @ centred, centred @ second @ centred / form.temperature**2
        )
        score = HeadMoments.of(form, process).score().logits()
        torch.testing.assert_close(
            score[1][head], (centred @ second @ centred).diagonal() / form.temperature**2
        )


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["autoregressive", "unit-walk"])
def test_a_constant_mean_is_in_the_norms_of_drawn_sequences(name: str) -> None:
    """Means three times as large as the spread: without them the variance is 80 times too large.

    What is left out is first order in the norm's deviation, along the mean: below a factor of 2.
    """
    form, covariance = normed(), colored()
    generator = torch.Generator().manual_seed(3)
    mean = 3 * torch.randn(MODEL, generator=generator, dtype=torch.float64).expand(TOKENS, -1)
    process = replace(TokenProcess.named(name, TOKENS, covariance=covariance), mean=mean.clone())
    logits = true_logits(form, process.sample(COUNT, generator=generator))
    logits = logits - logits.mean(-1, keepdim=True)
    centred = replace(form.under(covariance), query_norm=None, key_norm=None)
    found, blind = (
        HeadMoments.of(one, process).score().logits()[1].mean() / logits.var(0).mean()
        for one in (form, centred)
    )
    assert 1 < found < 2 and blind > 20
    rho = propagation(form, process, method="gaussian").rho
    assert (rho - gate(logits)).abs().mean() < 0.05
    rows = predicted_attention(form, process, law="exact", draws=COUNT, generator=generator)
    truth = attention_entropy(logits.softmax(-1)).mean(0)
    assert (rows.entropy - truth).abs().max() < 0.05 * math.log(TOKENS)


def test_the_size_of_weights_before_a_norm_changes_nothing() -> None:
    form, covariance = normed(), colored()
    assert form.query_norm is not None and form.key_norm is not None
    large = replace(
        form,
        query=7 * form.query,
        query_norm=replace(form.query_norm, rows=7 * form.query_norm.rows),
    )
    ours, theirs = form.under(covariance), large.under(covariance)
    assert torch.allclose(ours.query, theirs.query)
    assert torch.allclose(form.spectrum(covariance).r, large.spectrum(covariance).r)
    assert torch.allclose(form[1].under(covariance).query, ours.query[1])


def test_a_trained_model_with_qk_norm_has_the_logits_of_its_form(tmp_path: Path) -> None:
    """Up to the stated deviation of its norms, for the tokens that it reads."""
    words = ("attention", "looks", "at", "late", "tokens", "and", "early", "ones", "of", "text")
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(words), (300, 12), generator=generator).tolist()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(words[word] for word in line) for line in draws) + "\n")
    config = TrainConfig(
        corpus="text.txt", dim=32, layers=2, tokens=16, batch=8, steps=60, learning_rate=1e-2,
        measure_every=60, scale_strength=0.0, mean_strength=0.0, stabilizer="qk-norm",
    )  # fmt: skip
    train(config, tmp_path / "run", data=str(text), checkpoint_every=60, trackers=())
    model, _ = load_trained(tmp_path / "run", data=str(text))
    for live in find_attention(model.double().requires_grad_(False)):
        module, seen = live.module, []
        assert module is not None
        handle = module.q_proj.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0])
        )
        with torch.no_grad():
            model(torch.randint(0, 10, (64, 16), generator=generator))
        handle.remove()
        tokens = seen[0].detach()
        flat = tokens.flatten(0, 1)
        form = live.form().under(flat.T.cov(), flat.mean(0))
        assert form.query_norm is not None and form.key_norm is not None
        exact = SampledHeads.of(form, tokens).logits()
        plain = replace(form, query_norm=None, key_norm=None)
        error = SampledHeads.of(plain, tokens).logits() - exact
        # these tokens are no Gaussians: their norms' own deviation is what counts
        norms = (form.query_norm, form.key_norm)
        strays = [(1 / one.factor(tokens)).flatten(0, 1).std(0) for one in norms]
        gaussian = [one.deviation(flat.T.cov(), flat.mean(0)) for one in norms]
        relative = (error.square().mean((0, 2)) / exact.square().mean((0, 2))).sqrt()
        assert bool((relative < 1.5 * torch.hypot(*strays)).all())
        assert bool((torch.hypot(*gaussian) < 3 * torch.hypot(*strays)).all())
        assert bool((torch.hypot(*strays) < 3 * torch.hypot(*gaussian)).all())
        query, key = (
            norm(projection(tokens).unflatten(2, (-1, module.head_dim)).transpose(1, 2))
            for norm, projection in (
                (module.q_norm, module.q_proj),
                (module.k_norm, module.k_proj),
            )
        )
        own = (query[:, :, -1:] @ key.mT)[:, :, 0].detach() * module.scaling
        assert torch.allclose(own, exact, atol=1e-4 * own.abs().max().item())
