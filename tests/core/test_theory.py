"""ρ in all its forms: reference vectors of 40-digit arithmetic, limits, simulation, regimes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from locater import (
    ConfigError,
    InputError,
    LocaterError,
    PredictedAttention,
    QKForm,
    Rotary,
    TokenProcess,
    attention_entropy,
    classify,
    logit_moments,
    logit_variance,
    predicted_attention,
    propagation,
    rho_limit,
    score_moments,
)
from locater.core.theory import (
    LogitLaw,
    Method,
    Profile,
    logit_mean,
    normal_between,
    propagates,
    regime_of,
    rho_limit_slope,
)

NAN, INF = math.nan, math.inf
FALSE_ALARMS = 1e-6  # of each statistical test, shared among the numbers it compares


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def near(value: float) -> object:
    """Within 1e-10, relative: what 40-digit arithmetic gave, printed to 15 digits."""
    return pytest.approx(value, rel=1e-10, abs=1e-15)


# --- reference vectors: symmetric forms, the random walk ------------------------------------

STEP = torch.arange(1, 129, dtype=torch.float64)
SPECTRA = {  # eigenvalues, temperature
    "A": (double([1, 0.5, 0.25, -0.25]), 2.0),
    "B": (0.3 + 0.05 * (STEP[:16] - 8.5), 4.0),
    "C": (0.5 + 0.1 * STEP.cos(), math.sqrt(128)),
    "E": (0.1 * STEP.sin(), math.sqrt(128)),
    "F": (double([1.0]), 1.0),
    "G": (torch.full((25,), 0.001, dtype=torch.float64), 5.0),
}


MOMENTS = {  # token: mean and variance of its score
    "A8.1": (-0.203125, 0.1597900390625),
    "A8.4": (0.078125, 0.0308837890625),
    "A8.8": (0.453125, 0.1597900390625),
    "B40.1": (-0.56, 0.07994873046875),
    "B40.10": (-0.29, 0.03164404296875),
    "B40.20": (0.01, 0.01196435546875),
    "B40.30": (0.31, 0.02806591796875),
    "B40.40": (0.61, 0.07994873046875),
    "C40.16": (-0.611210630820116, 0.0276720157377418),
    "C40.20": (-0.045690070091124, 0.0213014797405638),
    "C40.24": (0.519830490637868, 0.0251238013388706),
    "C40.40": (2.78191273355384, 0.142341663686945),
    "C64.32": (-0.0285562938069525, 0.0212610417679255),
    "C64.40": (0.678344407104288, 0.0282288155148389),
    "E64.1": (0.00731610338157867, 0.00285769680777362),
    "E64.32": (0.0154931127520886, 4.19915246288997e-4),
    "E64.64": (0.0239338966184213, 0.00285769680777362),
    "F8.1": (-0.3125, 0.46484375),
    "F8.5": (0.1875, 0.08984375),
    "F8.8": (0.5625, 0.46484375),
    "G64.1": (0.0131640625, 5.6781005859375e-7),
    "G64.64": (0.0180859375, 5.6781005859375e-7),
}
RHO = {  # exact, Gaussian at finite length, in the limit, as printed
    "A8.1": (0.351595440328956, 0.304368321728646, 0.213315701152375, 0.267646363763102),
    "A8.4": (0.746572378762193, 0.671678955040765, 0.49999999827268, 0.449361391683362),
    "A8.8": (0.877054519417007, 0.785867018365331, 0.717427708888745, 0.401073961726423),
    "B40.1": (4.93207395539523e-4, 0.0238217768645383, 0.019667044729626, 0.0243859861525819),
    "B40.10": (0.0151645344833003, 0.0515252050369191, 0.0411638328605791, 0.173022017534217),
    "B40.20": (0.54620802281395, 0.536421746320835, 0.5, 0.494450651974148),
    "B40.30": (0.992921351545859, 0.967854967591129, 0.958810969569886, 0.649536559306028),
    "B40.40": (0.905854636942804, 0.900610366540158, 0.897950173613383, 0.582790750449774),
    "C40.16": (2.78551618128633e-5, 1.19267433401216e-4, 2.4601381013094e-4, 0.118705942057024),
    "C40.20": (0.377745887699279, 0.377120453384451, 0.499999999996613, 0.471497498964016),
    "C40.24": (0.997516398983486, 0.998254869579517, 0.996045399186239, 0.611328518796573),
    "C40.40": (3.08518302919318e-10, 1.16180083176026e-6, 1.06703245969405e-6, 0.0118978905483103),
    "C64.32": (0.422816774679096, 0.42236625836975, 0.499999999996613, 0.471497498964016),
    "C64.40": (0.967455835697023, 0.972191849215604, 0.956835829159681, 0.575115504719219),
    "E64.1": (0.555860883554593, 0.554428676753107, 0.438387867089561, 0.440046670599453),
    "E64.32": (0.776803100615719, 0.775194222417942, 0.5, 0.5),
    "E64.64": (0.675086091690362, 0.672821925854375, 0.561897651453023, 0.52950526943516),
    "F8.1": (0.438875689314529, 0.296240275497561, 0.25589374626663, 0.276481244515323),
    "F8.5": (0.811021971856444, 0.730835516666419, 0.639168363451269, 0.315693087882349),
    "F8.8": (0.809590879105071, 0.534784753240585, 0.487309239738077, 0.244264382426273),
    "G64.1": (1.0, 1.0, 5.60907740325197e-4, 7.63106961497493e-4),
    "G64.64": (1.0, 1.0, 0.999468442541421, 0.940077860570887),
}


@pytest.mark.paper("Eq. 6")
@pytest.mark.parametrize("token", RHO)
def test_symmetric_forms_meet_the_reference_vectors(token: str) -> None:
    tokens, position = (int(part) for part in token[1:].split("."))
    eigenvalues, temperature = SPECTRA[token[0]]
    form = QKForm.from_eigenvalues(eigenvalues, temperature=temperature)
    process, at = TokenProcess.random_walk(tokens), position - 1
    mean, variance = score_moments(form, process)
    assert (mean[at].item(), variance[at].item()) == tuple(map(near, MOMENTS[token]))
    exact, gaussian, limit, printed = map(near, RHO[token])
    for method, expected in (("exact", exact), ("gaussian", gaussian), ("as_printed", printed)):
        profile = propagation(form, process, method=method)
        assert profile.rho[at].item() == expected, method
        assert profile.theta[at].item() == position / tokens
        assert profile.label == method and profile.source == "theory"
    general = replace(form, is_symmetric=False)
    assert propagation(general, process).rho[at].item() == exact
    theta, spectrum = double(position / tokens), form.spectrum()
    xi, eta = spectrum.xi.item(), spectrum.eta.item()
    assert rho_limit(theta, xi=xi, eta=eta).item() == limit
    assert rho_limit(theta, xi=xi, eta=eta, lemma1="as_printed").item() == printed
    assert rho_limit(theta, xi=xi, eta=eta, tokens=tokens).item() == gaussian


# --- reference vectors: a form that is not symmetric ----------------------------------------

SKEWED = double([[1, 2], [-1, 0.5]])
SIGMAS = {"P": None, "Q": double([[2, 0.5], [0.5, 1]])}
TRACES = {"P": (1.5, -2.75, 6.25), "Q": (3.0, 0.25, 16.0)}  # tr W, tr W², ‖S‖²
SKEWED_MOMENTS = {  # mean and variance, and the variance of the symmetrized form
    "P8.1": (-0.339038825153672, 0.59130859375, 0.40673828125),
    "P8.4": (0.0587087392637612, 0.26318359375, 0.07861328125),
    "P8.8": (0.589038825153672, 0.59130859375, 0.40673828125),
    "Q8.1": (-0.803077650307344, 2.21142578125, 1.888427734375),
    "Q8.4": (-0.00758252147247766, 0.68798828125, 0.364990234375),
    "Q8.8": (1.05307765030734, 2.21142578125, 1.888427734375),
}
SKEWED_RHO = {  # exact, Gaussian at finite length, and exact of the symmetrized form
    "P8.1": (0.377444216964235, 0.288830751485157, 0.353167544503965),
    "P8.4": (0.580142126109662, 0.512289205894694, 0.703657093193902),
    "P8.8": (0.667484188611622, 0.481645263804103, 0.818855096850512),
    "Q8.1": (0.290576917332429, 0.181924293370351, 0.294995992758747),
    "Q8.4": (0.484888495068615, 0.384124050134012, 0.576754530902999),
    "Q8.8": (0.508701413181675, 0.246337236711454, 0.621267729834403),
}


@pytest.mark.paper("Lemma 1")
@pytest.mark.parametrize("token", SKEWED_RHO)
def test_asymmetric_forms_meet_the_reference_vectors(token: str) -> None:
    form = QKForm.from_matrix(SKEWED, temperature=math.sqrt(2))
    even = QKForm.from_matrix((SKEWED + SKEWED.mT) / 2, temperature=math.sqrt(2))
    sigma, at = SIGMAS[token[0]], int(token[3:]) - 1
    process, spectrum = TokenProcess.random_walk(8, covariance=sigma), form.spectrum(sigma)
    traces = (spectrum.trace, spectrum.trace_of_square, spectrum.frobenius_squared)
    assert tuple(trace.item() for trace in traces) == tuple(map(near, TRACES[token[0]]))
    expected_mean, expected_variance, even_variance = map(near, SKEWED_MOMENTS[token])
    mean, variance = score_moments(form, process)
    assert (mean[at].item(), variance[at].item()) == (expected_mean, expected_variance)
    mean, variance = score_moments(even, process)
    assert (mean[at].item(), variance[at].item()) == (expected_mean, even_variance)
    exact, gaussian, even_exact = map(near, SKEWED_RHO[token])
    assert propagation(form, process).rho[at].item() == exact
    assert propagation(form, process, method="gaussian").rho[at].item() == gaussian
    assert propagation(even, process).rho[at].item() == even_exact


@pytest.mark.paper("Section 4")
@given(model=st.integers(2, 5), tokens=st.integers(2, 12), seed=st.integers(0, 2**31))
def test_symmetrizing_takes_the_same_amount_off_the_variance_at_every_position(
    model: int, tokens: int, seed: int
) -> None:
    """κ‖(S − Sᵀ)/2‖²/λ²: the remark that (W + Wᵀ)/2 is equivalent holds for the mean alone."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(model, model, generator=generator, dtype=torch.float64)
    process = TokenProcess.random_walk(tokens)
    mean, variance = score_moments(QKForm.from_matrix(matrix, temperature=1.3), process)
    even = QKForm.from_matrix((matrix + matrix.mT) / 2, temperature=1.3)
    even_mean, even_variance = score_moments(even, process)
    gap = (1 - tokens**-2) / 12 * (matrix - matrix.mT).square().sum() / 4 / 1.3**2
    torch.testing.assert_close(mean, even_mean)
    torch.testing.assert_close(variance - even_variance, gap.expand(tokens))


# --- reference vectors: Eq. 6 as a function of ξ, η and θ -----------------------------------


@pytest.mark.paper("Eq. 6")
@pytest.mark.parametrize(
    ("xi", "eta", "theta", "rho", "slope", "printed"),
    [
        (0.0, 1.0, 0.5, 0.49973399724743, 0.0, 0.331665816194981),
        (0.0, 1.0, 1.0, 0.404784868087238, -0.379999007066316, 0.23308528912793),
        (0.0, 3.0, 0.5, 0.375893460505038, 0.0, 0.125612979146726),
        (0.0, 3.0, 0.0, 0.168739708229971, 0.271364005402682, 0.168739708229971),
        (5.0, 0.5, 0.6, 0.940076327082004, 1.49254892900742, 0.574855892340127),
        (5.0, 1.0, 0.75, 0.288856260724911, -3.26897448179964, 0.254711938333285),
        (10.0, 1.0, 0.55, 0.907492509433711, -0.369109713223464, 0.353529240952762),
        (-5.0, 0.5, 0.4, 0.940076327082004, -1.49254892900742, 0.643323580667008),
        (11.3137084989848, 1.0, 0.5, 0.49973399724743, 15.5965243956166, 0.331665816194981),
    ],
)
def test_the_limit_meets_its_reference_vectors(
    xi: float, eta: float, theta: float, rho: float, slope: float, printed: float
) -> None:
    at = double(theta)
    assert rho_limit(at, xi=xi, eta=eta).item() == near(rho)
    assert rho_limit_slope(at, xi=xi, eta=eta).item() == near(slope)
    assert rho_limit(at, xi=xi, eta=eta, lemma1="as_printed").item() == near(printed)


@pytest.mark.parametrize("lemma1", ["corrected", "as_printed"])
@given(share=st.integers(0, 100), xi=st.integers(-12, 12), scale=st.integers(-2, 3))
def test_the_slope_is_the_derivative_of_rho(lemma1: str, share: int, xi: int, scale: int) -> None:
    theta, eta = double(share / 100).requires_grad_(), 2.0**scale
    rho = rho_limit(theta, xi=float(xi), eta=eta, lemma1=lemma1)
    (slope,) = torch.autograd.grad(rho, theta)
    actual = rho_limit_slope(theta.detach(), xi=float(xi), eta=eta, lemma1=lemma1)
    torch.testing.assert_close(actual, slope, rtol=1e-9, atol=1e-12)


@pytest.mark.paper("Lemma 2")
def test_rho_does_not_flatten_as_xi_vanishes() -> None:
    """Lemma 2.3 claims ρ′ → 0; the slope stays, and a large scale is middle-focused."""
    theta = torch.linspace(0, 1, 201, dtype=torch.float64)
    slope = rho_limit_slope(theta, xi=1e-12, eta=1.0).abs().amax()
    assert slope.item() == pytest.approx(0.381, abs=5e-4)
    rho = rho_limit(theta, xi=0.0, eta=5.0)
    assert (rho.argmax().item(), round(rho[0].item(), 3)) == (100, 0.103)
    assert rho[100].item() == pytest.approx(0.256, abs=5e-4)


@pytest.mark.paper("Lemma 2")
@given(share=st.integers(0, 100), xi=st.integers(-50, 50), scale=st.integers(-4, 8))
def test_rho_vanishes_at_least_as_fast_as_the_inverse_scale(
    share: int, xi: int, scale: int
) -> None:
    rho = rho_limit(double(share / 100), xi=float(xi), eta=2.0**scale)
    assert rho.item() <= 1.38198 / 2.0**scale


@given(tokens=st.integers(2, 40), model=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_lemma_1_at_finite_length_is_the_moments_of_the_walk(
    tokens: int, model: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(model, generator=generator, dtype=torch.float64)
    form = QKForm.from_eigenvalues(values, temperature=0.7)
    theta = torch.arange(1, tokens + 1, dtype=torch.float64) / tokens
    mean, variance = score_moments(form, TokenProcess.random_walk(tokens))
    xi, eta = form.spectrum().xi.item(), form.spectrum().eta.item()
    torch.testing.assert_close(variance, logit_variance(theta, tokens=tokens) * eta**2)
    expected = logit_mean(theta, xi=xi, eta=eta, tokens=tokens)
    torch.testing.assert_close(mean, expected, rtol=1e-9, atol=1e-12)
    long = logit_variance(theta, tokens=1e9)
    torch.testing.assert_close(long, logit_variance(theta), rtol=1e-7, atol=0)


def test_weights_that_vanish_leave_every_gate_open() -> None:
    """Not a half, as the limit with its missing 1/T says."""
    form = QKForm.from_eigenvalues(torch.zeros(4, dtype=torch.float64), temperature=1.0)
    walk = TokenProcess.random_walk(16)
    for method in ("exact", "gaussian", "saddlepoint"):
        assert (propagation(form, walk, method=method).rho == 1).all()
    small = QKForm.from_eigenvalues(torch.full((4,), 1e-6).double(), temperature=1.0)
    assert (propagation(small, walk).rho == 1).all()


@pytest.mark.parametrize("method", ["exact", "gaussian", "saddlepoint"])
def test_a_score_that_is_always_zero_or_one_counts_as_open(method: Method) -> None:
    """The interval is closed: logits of 1 and -1, whatever the tokens, have scores 1 and 0."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    form = QKForm(zero, zero, 1.0, distance_bias=double([1.0, -1.0]))
    assert propagates(double([-1.0, 1.0])).all()
    assert (propagation(form, TokenProcess.random_walk(2), method=method).rho == 1).all()


@pytest.mark.parametrize("dim", [2, 4, 16, 128])
def test_the_saddlepoint_method_is_closer_to_the_exact_one_than_the_gaussian_is(dim: int) -> None:
    form, walk = (
        QKForm.from_xi_eta(0.5 * math.sqrt(dim), 1.0, dim=dim),
        TokenProcess.random_walk(20),
    )
    exact = propagation(form, walk).rho
    errors = [
        (propagation(form, walk, method=method).rho - exact).abs().amax()
        for method in ("saddlepoint", "gaussian")
    ]
    assert 0 < errors[0] < errors[1]


# --- simulation ------------------------------------------------------------------------------


def sampled_logits(form: QKForm, process: TokenProcess, count: int, seed: int) -> Iterator[Tensor]:
    """Logits of the last token of sampled sequences, as an attention layer computes them."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(1, process.tokens + 1)
    for _ in range(0, count, 20_000):
        tokens = process.sample(20_000, model=form.query.shape[-1], generator=generator)
        query, keys = tokens[:, -1] @ form.query.mT, tokens @ form.key.mT
        query = query if form.query_bias is None else query + form.query_bias
        keys = keys if form.key_bias is None else keys + form.key_bias
        if form.rotary is not None:
            keys = form.rotary.turn(keys, form.rotary.phases(positions))
            query = form.rotary.turn(query, form.rotary.phases(positions[-1]))
        logits = (keys @ query[..., None])[..., 0] / form.temperature
        bias = form.distance_bias
        yield logits if bias is None else logits + bias[: process.tokens].flip(-1)


def walk_case() -> tuple[QKForm, TokenProcess]:
    return QKForm.from_matrix(SKEWED, temperature=1.0), TokenProcess.random_walk(
        10, covariance=SIGMAS["Q"]
    )


def stationary_case() -> tuple[QKForm, TokenProcess]:
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)
    return QKForm(query, key, 0.3), TokenProcess.autoregressive(8, 0.8)


def full_case() -> tuple[QKForm, TokenProcess]:
    """An arbitrary kernel with covariance, means, biases, partial rotation and distances."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mixing, coloring = normal(6, 6), normal(4, 4)
    process = TokenProcess(mixing @ mixing.mT / 6, coloring @ coloring.mT / 4, 0.5 * normal(6, 4))
    form = QKForm(
        normal(3, 4),
        normal(3, 4),
        1.0,
        query_bias=normal(3),
        key_bias=normal(3),
        rotary=Rotary(double([0.7]), "interleaved"),
        distance_bias=normal(9),
    )
    return form, process


CASES = {"walk": walk_case, "stationary": stationary_case, "full": full_case}


@pytest.mark.statistical  # resolution: 0.006 of rho where it is a half
@pytest.mark.paper("Definition 1")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("method", "holds"), [("exact", True), ("gaussian", False), ("as_printed", False)]
)
def test_sampled_sequences_open_their_gates_as_often_as_rho_says(
    case: str, method: Method, holds: bool, seed: int
) -> None:
    """Exact binomial tails of 200,000 sequences, at every position."""
    form, process = CASES[case]()
    count = 200_000
    opened = sum(propagates(x).sum(0) for x in sampled_logits(form, process, count, seed))
    rho = propagation(form, process, method=method).rho
    assert isinstance(opened, Tensor)
    binomial = stats.binom(count, rho.clamp(0, 1).numpy())
    likely = 2 * np.minimum(binomial.cdf(opened.numpy()), binomial.sf(opened.numpy() - 1))
    assert bool((likely >= FALSE_ALARMS / process.tokens).all()) == holds


@pytest.mark.statistical  # resolution: 10 % of a variance
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("stretch", "holds"), [(1.0, True), (1.05, False)])
def test_sampled_logits_have_the_moments_of_the_theory(
    case: str, stretch: float, holds: bool, seed: int
) -> None:
    form, process = CASES[case]()
    count = 100_000
    logits = torch.cat(list(sampled_logits(form, process, count, seed)))
    mean, covariance = logit_moments(form, process)
    spread = logits - stretch * mean
    products = torch.einsum("nj,nk->njk", spread, spread) - stretch**2 * covariance
    sample = torch.cat((spread, products.flatten(1)), -1)
    z = sample.mean(0) / (sample.std(0) / math.sqrt(count))
    limit = NormalDist().inv_cdf(1 - FALSE_ALARMS / (2 * len(z)))
    assert bool((z.abs() < limit).all()) == holds


@pytest.mark.statistical  # resolution: 0.01 of an attention weight
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("law", "holds"), [("exact", True), ("gaussian", False)])
def test_predicted_attention_is_that_of_sampled_sequences(
    case: str, law: LogitLaw, holds: bool, seed: int
) -> None:
    """Few dimensions make the logits far from Gaussian, so that only their own law will do."""
    form, process = CASES[case]()
    count = 100_000
    generator = torch.Generator().manual_seed(seed + 1)
    predicted = predicted_attention(form, process, law=law, draws=count, generator=generator)
    attention = torch.softmax(torch.cat(list(sampled_logits(form, process, count, seed))), -1)
    sample = torch.cat((attention, attention_entropy(attention)[:, None]), -1)
    error = sample.std(0) / math.sqrt(count)
    theory = torch.cat((predicted.attention, predicted.entropy[None]))
    own = torch.cat((predicted.attention_error, predicted.entropy_error[None]))
    z = (sample.mean(0) - theory) / (error.square() + own.square()).sqrt()
    limit = NormalDist().inv_cdf(1 - FALSE_ALARMS / (2 * len(z)))
    assert bool((z.abs() < limit).all()) == holds


@pytest.mark.statistical  # resolution: 0.003 of an attention weight
@pytest.mark.parametrize("law", ["gaussian", "exact"])
@pytest.mark.parametrize(("shift", "holds"), [(0.0, True), (0.05, False)])
def test_a_fixed_query_has_gaussian_logits_and_both_laws_agree_with_quadrature(
    law: LogitLaw, shift: float, holds: bool, seed: int
) -> None:
    """Queries that are all bias: of two keys, the attention is a logistic of one normal."""
    form = QKForm(
        torch.zeros(2, 3, dtype=torch.float64),
        double([[1.0, 0.5, 0.0], [0.0, -1.0, 2.0]]),
        1.5,
        query_bias=double([1.0, 0.7]),
    )
    process = TokenProcess(double([[1.0, 0.3], [0.3, 2.0]]), None, double([[0.5, 0, 0], [0, 0, 0]]))
    mean, covariance = logit_moments(form, process)
    gap, spread = (
        mean[0] - mean[1] + shift,
        covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1],
    )
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    first = torch.sigmoid(gap + spread.sqrt() * torch.from_numpy(nodes))
    weight = torch.from_numpy(weights) / math.sqrt(2 * math.pi)
    share = (weight * first).sum()
    entropy = (weight * attention_entropy(torch.stack((first, 1 - first), -1))).sum()
    generator = torch.Generator().manual_seed(seed)
    predicted = predicted_attention(form, process, law=law, draws=200_000, generator=generator)
    z = torch.stack(
        (
            (predicted.attention[0] - share) / predicted.attention_error[0],
            (predicted.entropy - entropy) / predicted.entropy_error,
        )
    )
    limit = NormalDist().inv_cdf(1 - FALSE_ALARMS / 4)
    assert bool((z.abs() < limit).all()) == holds


@pytest.mark.parametrize("law", ["gaussian", "exact"])
def test_predicted_attention_repeats_unless_it_is_given_a_generator(law: LogitLaw) -> None:
    form, process = full_case()
    first, second = (predicted_attention(form, process, law=law, draws=50) for _ in range(2))
    assert torch.equal(first.attention, second.attention)
    assert first.attention.sum().item() == pytest.approx(1.0, rel=1e-12)
    generator = torch.Generator().manual_seed(1)
    other = predicted_attention(form, process, law=law, draws=50, generator=generator)
    assert not torch.equal(first.attention, other.attention)
    stack = QKForm(form.query.expand(2, 3, 3, 4), form.key.expand(2, 3, 3, 4), 1.0)
    heads = predicted_attention(stack, process, law=law, draws=50)
    assert heads.attention.shape == (2, 3, 6) and heads.entropy.shape == (2, 3)
    assert isinstance(heads, PredictedAttention)


@pytest.mark.statistical  # resolution: a factor of 1.5
@pytest.mark.parametrize("law", ["gaussian", "exact"])
@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (0.5, False)])
def test_the_errors_of_predicted_attention_are_those_of_repeated_predictions(
    law: LogitLaw, factor: float, holds: bool, seed: int
) -> None:
    form, process = full_case()
    generator = torch.Generator().manual_seed(seed)
    runs = [
        predicted_attention(form, process, law=law, draws=400, generator=generator)
        for _ in range(60)
    ]
    values = torch.stack([torch.cat((run.attention, run.entropy[None])) for run in runs])
    errors = torch.stack(
        [torch.cat((run.attention_error, run.entropy_error[None])) for run in runs]
    )
    ratio = values.var(0) / (factor**2 * errors.square().mean(0)) * (len(runs) - 1)
    likely = stats.chi2(len(runs) - 1)
    low, high = likely.ppf(FALSE_ALARMS / (2 * 7)), likely.isf(FALSE_ALARMS / (2 * 7))
    assert bool(((ratio > low) & (ratio < high)).all()) == holds


# --- regimes ---------------------------------------------------------------------------------


def concentrated(ratio: float, dim: int = 512) -> QKForm:
    """Equal eigenvalues with tr(W)/λ = ratio: the smallest variance that many dimensions have."""
    return QKForm.from_eigenvalues(
        torch.full((dim,), ratio / math.sqrt(dim), dtype=torch.float64), temperature=math.sqrt(dim)
    )


@pytest.mark.paper("Lemma 2")
@pytest.mark.parametrize(
    ("ratio", "count", "name"),
    [
        (0.03, 64, "uniform"),
        (0.1, 42, "late"),
        (2.0, 31, "late"),
        (5.0, 13, "middle"),
        (20.0, 3, "middle"),
    ],
)
def test_a_concentrated_spectrum_turns_on_the_tokens_of_the_zero_variance_rule(
    ratio: float, count: int, name: str
) -> None:
    """Those with 0 < 1/T + u_i r < 1; at r = 2 the scores 0 and 1 occur and may go either way."""
    walk, position = TokenProcess.random_walk(64), torch.arange(1, 65)
    score = 1 / 64 + (position - 32.5) / 64 * ratio
    assert ((score > 0) & (score < 1)).sum().item() == count
    regime = classify(concentrated(ratio), walk)
    is_on = (regime.first <= position) & (position <= regime.last)
    assert is_on.sum() == regime.count
    assert is_on[(score > 0) & (score < 1)].all() and not is_on[(score < 0) | (score > 1)].any()
    assert regime.name == name and regime.r.item() == pytest.approx(ratio, rel=1e-12)
    mirrored = classify(concentrated(-ratio), walk)
    assert mirrored.count == regime.count and mirrored.r == -regime.r
    assert (mirrored.first, mirrored.last) == (65 - regime.last, 65 - regime.first)
    assert mirrored.name == {"late": "early"}.get(name, name)


def test_all_tokens_are_on_up_to_twice_the_inverse_length() -> None:
    walk, edge = TokenProcess.random_walk(64), 2 / 63
    assert classify(concentrated(0.98 * edge), walk).name == "uniform"
    assert classify(concentrated(1.02 * edge), walk).count.item() == 63


def test_every_regime_has_its_form_and_a_stack_names_them_in_order() -> None:
    tokens, dim = 12, 64
    ones, signs = torch.ones(dim).double(), torch.ones(dim).double()
    signs[::2] = -1
    values = torch.stack(
        [0 * ones, ones / 8, -ones / 8, 5 * ones / 8, 1000 * signs, 0 * ones]
    )  # r = 0, 1, -1, 5, then a wide spectrum, then nothing but distances
    distance = torch.zeros(6, tokens, dtype=torch.float64)
    distance[5, ::2] = -10.0
    names = ["uniform", "late", "early", "middle", "vanishing", "scattered"]
    walk, matrices = TokenProcess.random_walk(tokens), torch.diag_embed(values)
    identity = torch.eye(dim, dtype=torch.float64).expand(2, 3, dim, dim)
    matrices, distance = matrices.unflatten(0, (2, 3)), distance.unflatten(0, (2, 3))
    stack = QKForm(identity, matrices, math.sqrt(dim), distance_bias=distance)
    for method in ("exact", "gaussian"):
        regime = classify(stack, walk, method=method)
        assert regime.names == names and regime.count.shape == (2, 3)
        assert (regime.profile.rho >= 0).all()
    with pytest.raises(InputError, match=r"describes 6 heads.\nhint: use .names instead"):
        _ = regime.name
    alone = QKForm(identity[0, 0], matrices[0, 1], math.sqrt(dim))
    assert classify(alone, walk).name == "late"


# --- differentiability -----------------------------------------------------------------------


@pytest.mark.parametrize("rotary", [None, Rotary(double([0.4]))])
@pytest.mark.parametrize("output", ["moments", "rho"])
def test_moments_and_gaussian_rho_are_differentiable_in_all_they_depend_on(
    rotary: Rotary | None, output: str
) -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = [(2, 3, 2), (2, 3, 2), (4, 4), (2, 2), (4, 2), (2, 3)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    def function(*parts: Tensor) -> tuple[Tensor, ...]:
        query, key, mixing, coloring, mean, bias = parts
        process = TokenProcess(
            mixing @ mixing.mT + torch.eye(4), coloring @ coloring.mT + torch.eye(2), mean
        )
        form = QKForm(query, key, 1.5, query_bias=bias, rotary=rotary)
        if output == "moments":
            return score_moments(form, process)
        return (propagation(form, process, method="gaussian").rho,)

    assert torch.autograd.gradcheck(function, [part.requires_grad_() for part in inputs])


# --- bad input -------------------------------------------------------------------------------

FORM, WALK, THETA = concentrated(1.0, dim=2), TokenProcess.random_walk(3), torch.tensor([0.5])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "error", "message", "hint"),
    [
        (
            lambda: propagation(FORM, WALK, method="precise"),
            ConfigError,
            "unknown method 'precise'.",
            "choose one of: exact, gaussian, saddlepoint, as_printed.",
        ),
        (
            lambda: classify(FORM, WALK, method="precise"),
            ConfigError,
            "unknown method 'precise'.",
            "choose one of: exact",
        ),
        (
            lambda: logit_variance(THETA, lemma1="fixed"),
            ConfigError,
            "unknown lemma1 'fixed'.",
            "choose one of: corrected, as_printed.",
        ),
        (
            lambda: rho_limit(THETA, xi=1.0, eta=1.0, lemma1="fixed"),
            ConfigError,
            "unknown lemma1 'fixed'.",
            "choose one of: corrected, as_printed.",
        ),
        (
            lambda: predicted_attention(FORM, WALK, law="normal"),
            ConfigError,
            "unknown law 'normal'.",
            "choose one of: gaussian, exact.",
        ),
        (
            lambda: predicted_attention(FORM, WALK, draws=0),
            ConfigError,
            "draws must be 2 or more, got 0.",
            "2000 is usual",
        ),
        (
            lambda: predicted_attention(FORM, WALK, draws=1),
            ConfigError,
            "draws must be 2 or more, got 1.",
            "2000 is usual",
        ),
        (lambda: rho_limit(THETA, xi=NAN, eta=1.0), ConfigError, "got xi = nan", "tr(W)/sqrt"),
        (lambda: rho_limit(THETA, xi=INF, eta=1.0), ConfigError, "got xi = inf", "tr(W)/sqrt"),
        (lambda: rho_limit(THETA, xi=1.0, eta=0.0), ConfigError, "eta = 0.0.", "/temperature"),
        (lambda: rho_limit(THETA, xi=1.0, eta=-1.0), ConfigError, "eta = -1.0.", "/temperature"),
        (lambda: rho_limit(THETA, xi=1.0, eta=NAN), ConfigError, "eta = nan.", "/temperature"),
    ],
)
def test_what_the_theory_cannot_answer_is_refused(
    call: Callable[[], object], error: type[LocaterError], message: str, hint: str
) -> None:
    with pytest.raises(error, match=f"{re.escape(message)}(.|\n)*hint: .*{re.escape(hint)}"):
        call()


@pytest.mark.parametrize("mean", [-30.0, -12.0, 13.0, 31.0])
def test_gaussian_chances_far_from_the_interval_keep_their_digits(mean: float) -> None:
    """Against math.erfc, 30 deviations out, where a difference of two ones would be zero."""
    below = min(mean, 1 - mean)
    expected = (math.erfc(-below / math.sqrt(2)) - math.erfc((1 - below) / math.sqrt(2))) / 2
    one = torch.ones((), dtype=torch.float64)
    assert normal_between(mean * one, one).item() == pytest.approx(expected, rel=1e-12)


def test_a_head_has_vanished_below_a_tenth_and_a_token_is_on_from_half_the_largest() -> None:
    for peak, name in ((0.0999, "vanishing"), (0.1001, "late"), (0.19, "late")):
        rho = peak * torch.tensor([0.1, 0.499, 0.5, 1.0], dtype=torch.float64)
        regime = regime_of(Profile.by_token(rho), torch.tensor(3.0))
        assert (regime.name, regime.count.item(), regime.first.item()) == (name, 2, 3)
