"""Where attention looks, in theory: moments (Lemma 1), ρ (Eq. 6) and regimes (Lemma 2).

And what theory, simulation and measurement share: the record of ρ by position, the softmax with
its piecewise-linear form (Section 2), the entropy of attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locater.core.form import QKForm
from locater.core.process import TokenProcess
from locater.core.score import HeadMoments, LogitDraws, normal_between, symmetric_rho
from locater.errors import ConfigError, InputError, check_choice
from locater.notebook import Shown

Source = Literal["theory", "simulated", "measured"]
ON = 0.5
"""A token is on when its ρ is at least this share of the largest ρ."""
VANISHING = 0.1
"""A largest ρ below this counts as vanished."""


def is_on(rho: Float[Tensor, "*heads positions"]) -> Bool[Tensor, "*heads positions"]:
    """Which tokens are on, next to the one that lets the most through."""
    return rho >= ON * rho.amax(-1, keepdim=True)


def participation(rho: Float[Tensor, "*heads positions"]) -> Float[Tensor, "*heads"]:
    """(Σρ)² / (T Σρ²): 1 when ρ is uniform, 1/T when a single token is on."""
    squares = rho.square().sum(-1).clamp_min(torch.finfo(rho.dtype).tiny)
    return rho.sum(-1).square() / (rho.shape[-1] * squares)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Profile(Shown):
    """Signal propagation probability ρ (Definition 1) at relative positions θ = i/T.

    >>> profile = Profile(theta=torch.tensor([0.5, 1.0]), rho=torch.tensor([0.2, 0.8]))
    >>> profile.peak.item(), round(profile.participation.item(), 3)
    (0.8..., 0.735)
    """

    theta: Float[Tensor, " positions"]
    rho: Float[Tensor, "*heads positions"]
    source: Source = "theory"
    standard_error: Float[Tensor, "*heads positions"] | None = None
    """Of `rho`, where it was sampled; None where it was computed."""
    label: str = ""

    _picture = ("line", "theta:Q", "rho:Q", "head:N")

    def _line(self) -> str:
        heads = self.rho.shape[:-1].numel()
        return f"{self.label or self.source}, {heads} heads, {len(self.theta)} positions"

    def _table(self) -> list[dict[str, Any]]:
        heads = self.rho.reshape(-1, self.rho.shape[-1]).tolist()
        places = self.theta.tolist()
        return [
            {"head": head, "theta": theta, "rho": rho}
            for head, row in enumerate(heads)
            for theta, rho in zip(places, row, strict=True)
        ]

    @classmethod
    def by_token(
        cls,
        rho: Float[Tensor, "*heads tokens"],
        label: str = "",
        *,
        source: Source = "theory",
        standard_error: Float[Tensor, "*heads tokens"] | None = None,
    ) -> Profile:
        """A profile at every token, θ = 1/T … 1."""
        tokens = rho.shape[-1]
        theta = torch.arange(1, tokens + 1, dtype=torch.float64, device=rho.device) / tokens
        return cls(theta=theta, rho=rho, source=source, standard_error=standard_error, label=label)

    def __post_init__(self) -> None:
        if self.rho.shape[-1:] != self.theta.shape:
            raise InputError(
                f"rho has {self.rho.shape[-1]} positions and theta has {self.theta.shape[0]}.",
                hint="give one rho for every theta, along the last axis.",
            )

    @property
    def peak(self) -> Float[Tensor, "*heads"]:
        """The largest ρ."""
        return self.rho.amax(-1)

    @property
    def participation(self) -> Float[Tensor, "*heads"]:
        """How evenly ρ is spread over the tokens: see `participation`."""
        return participation(self.rho)


def linearized_softmax(logits: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens"]:
    """⟨γⁱ, ω⟩ + γ₀ⁱ = (ω_i − mean ω)/T + 1/T, the Taylor expansion of the softmax at the origin.

    Paper: Section 2.

    >>> linearized_softmax(torch.tensor([1.0, 0.0, -1.0, 0.0]))
    tensor([0.5000, 0.2500, 0.0000, 0.2500])
    """
    tokens = logits.shape[-1]
    if tokens < 2:
        raise InputError(
            f"a softmax over {tokens} token has nothing to choose.", hint="give at least 2 tokens."
        )
    return (logits - logits.mean(-1, keepdim=True) + 1) / tokens


def piecewise_softmax(logits: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens"]:
    """The linearized softmax, cut off at 0 and 1; its entries need not add up to 1.

    Paper: Section 2, Fig. 1.

    >>> piecewise_softmax(torch.tensor([4.0, 0.0]))
    tensor([1., 0.])
    """
    return linearized_softmax(logits).clamp(0, 1)


def propagates(logits: Float[Tensor, "*batch tokens"]) -> Bool[Tensor, "*batch tokens"]:
    """Whether a token is on: ⟨γⁱ, ω⟩ + γ₀ⁱ in [0, 1].

    Paper: Definition 1; ρ_i is the probability of this event.

    >>> propagates(torch.tensor([4.0, 2.0, 0.0, -2.0]))
    tensor([ True,  True,  True, False])
    """
    score = linearized_softmax(logits)
    return (score >= 0) & (score <= 1)


def attention_entropy(probabilities: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch"]:
    """Shannon entropy −Σ p ln p of attention rows, in nats; 0 ln 0 counts as 0.

    Paper: Section 5 (after Zhai et al. 2023).

    >>> attention_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    return torch.special.entr(probabilities).sum(-1)


Lemma1 = Literal["corrected", "as_printed"]
Method = Literal["exact", "gaussian", "saddlepoint", "as_printed"]
LogitLaw = Literal["gaussian", "exact"]
RegimeName = Literal["late", "middle", "early", "uniform", "vanishing", "scattered"]


def logit_variance(
    theta: Float[Tensor, "*shape"], *, tokens: float = math.inf, lemma1: Lemma1 = "corrected"
) -> Float[Tensor, "*shape"]:
    """Variance of the linearized softmax argument at θ, in units of tr(W²)/λ²; exact for every T.

    For symmetric W_QK and the random walk.
    Paper: Lemma 1 (T → ∞).  Erratum E7: printed as 2θ² + 7/12; the limit is 2θ² − 2θ + 7/12.

    >>> logit_variance(torch.tensor(0.5)).item() * 12
    1.0...
    """
    check_choice("lemma1", lemma1, get_args(Lemma1))
    if lemma1 == "as_printed":
        return 2 * theta**2 + 7 / 12
    step = 1 / tokens
    spread = theta**2 - theta * (1 + step) + (1 + step) * (2 + step) / 6
    return spread + (theta - (1 + step) / 2) ** 2


def logit_mean(
    theta: Float[Tensor, "*shape"], *, xi: float, eta: float, tokens: float = math.inf
) -> Float[Tensor, "*shape"]:
    """Mean of the linearized softmax argument at θ for the random walk, exact for every T.

    Paper: Lemma 1.  Erratum E8: the γ₀ = 1/T that the paper drops can move ρ from 0 to 1.
    """
    step = 1 / tokens
    return step + (theta - (1 + step) / 2) * xi * eta


def rho_limit(
    theta: Float[Tensor, "*shape"],
    *,
    xi: float,
    eta: float,
    lemma1: Lemma1 = "corrected",
    tokens: float = math.inf,
) -> Float[Tensor, "*shape"]:
    """ρ(θ) of a Gaussian score, as a function of ξ and η alone; the limit T → ∞ by default.

    Paper: Eq. 6, with Lemma 1's variance `corrected` (E7) or `as_printed`.  A finite `tokens` puts
    the exact finite-T mean and variance in place of their limits.

    >>> rho_limit(torch.tensor([0.6]).double(), xi=5.0, eta=0.5)
    tensor([0.9401], dtype=torch.float64)
    """
    if not (math.isfinite(xi) and 0 < eta < math.inf and tokens >= 2):
        raise ConfigError(
            f"Eq. 6 needs a finite xi and a positive finite eta (and at least 2 tokens, not "
            f"{tokens:g}), got xi = {xi}, eta = {eta}.",
            hint="xi = tr(W)/sqrt(tr(W^2)), eta = sqrt(tr(W^2))/temperature.",
        )
    if lemma1 == "as_printed":
        tokens = math.inf
    variance = eta**2 * logit_variance(theta, tokens=tokens, lemma1=lemma1)
    return normal_between(logit_mean(theta, xi=xi, eta=eta, tokens=tokens), variance)


def rho_limit_slope(
    theta: Float[Tensor, "*shape"], *, xi: float, eta: float, lemma1: Lemma1 = "corrected"
) -> Float[Tensor, "*shape"]:
    """ρ′(θ) of Eq. 6 in the limit.

    Paper: proof of Lemma 2.3.  Erratum E15: both printed numerators are wrong, and so is the claim
    that ρ′ vanishes with ξ (E14).
    """
    below, offset = theta - 0.5, 1 / eta
    variance = 2 * logit_variance(theta, lemma1=lemma1)
    first = torch.exp(-((below * xi) ** 2) / variance)
    second = torch.exp(-((below * xi - offset) ** 2) / variance)
    if lemma1 == "as_printed":
        bend, pull = (2 * theta + 7 / 6) * xi, 4 * theta * offset
    else:
        bend, pull = torch.full_like(theta, xi / 6), 4 * below * offset
    return (bend * first - (bend + pull) * second) / (math.sqrt(math.pi) * variance**1.5)


def logit_moments(
    form: QKForm, process: TokenProcess
) -> tuple[Float[Tensor, "*heads tokens"], Float[Tensor, "*heads tokens tokens"]]:
    """Exact mean and covariance of the last token's logits ω over all keys, 1/λ included.

    A key bias without rotation adds the same to all keys and is left out: no softmax sees it.

    >>> mean, covariance = logit_moments(
    ...     QKForm.from_eigenvalues(torch.ones(2), temperature=1.0), TokenProcess.random_walk(3)
    ... )
    >>> mean
    tensor([2., 4., 6.], dtype=torch.float64)
    """
    return HeadMoments.of(form, process).logits()


def score_moments(
    form: QKForm, process: TokenProcess
) -> tuple[Float[Tensor, "*heads tokens"], Float[Tensor, "*heads tokens"]]:
    """Mean and variance of ⟨γⁱ, ω⟩ + γ₀ⁱ at every position, exact at finite T for any form.

    Differentiable in the form's factors and the process' kernel, covariance and means.
    Paper: Lemma 1 (symmetric W_QK, random walk, T → ∞).  Errata E7, E8, E9.

    >>> form = QKForm.from_eigenvalues(torch.tensor([1.0, 0.5, 0.25, -0.25]), temperature=2.0)
    >>> mean, variance = score_moments(form, TokenProcess.random_walk(8))
    >>> mean[0].item(), variance[0].item()
    (-0.203125, 0.1597900390625)
    """
    return HeadMoments.of(form, process).score().moments()


def propagation(
    form: QKForm, process: TokenProcess, *, method: Method = "exact", tolerance: float | None = None
) -> Profile:
    """ρ_i, the probability that token i is on (gradient passes), at every position of every head.

    `exact` inverts the law of the score itself, to about 11 digits for every rank, or to an
    absolute `tolerance` (1e-7 is several times faster); `gaussian` uses
    its exact mean and variance, and is differentiable; `saddlepoint` is Lugannani and Rice's;
    `as_printed` is the paper's Eq. 6 with Lemma 1 as printed, on the symmetrized form.
    Paper: Definition 1, Eq. 6.

    >>> form = QKForm.from_eigenvalues(torch.ones(1), temperature=1.0)
    >>> propagation(form, TokenProcess.random_walk(8)).rho[[0, 4, 7]]
    tensor([0.4389, 0.8110, 0.8096], dtype=torch.float64)
    """
    check_choice("method", method, get_args(Method))
    extras = (process.mean, form.query_bias, form.rotary, form.distance_bias, form.relative)
    if method == "as_printed":
        spectrum = form.spectrum(process.covariance)
        theta = torch.arange(1, process.tokens + 1).to(spectrum.trace) / process.tokens
        scale = (spectrum.trace_of_square + spectrum.frobenius_squared).clamp_min(0) / 2
        mean = (theta - 0.5) * spectrum.r[..., None]
        variance = logit_variance(theta, lemma1="as_printed") * scale[..., None]
        rho = normal_between(mean, variance / form.temperature**2)
    elif method != "gaussian" and form.is_symmetric and all(part is None for part in extras):
        rho = symmetric_rho(form, process, method, tolerance)
    else:
        rho = HeadMoments.of(form, process).rho(method, tolerance)
    return Profile.by_token(rho, method)


@dataclass(frozen=True, eq=False)
class PredictedAttention:
    """Mean attention by position and its mean entropy, each with its sampling error.

    >>> form = QKForm.from_eigenvalues(torch.zeros(2), temperature=1.0)  # looks at all alike
    >>> predicted_attention(form, TokenProcess.random_walk(4)).attention
    tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """

    attention: Float[Tensor, "*heads tokens"]
    attention_error: Float[Tensor, "*heads tokens"]
    entropy: Float[Tensor, "*heads"]
    entropy_error: Float[Tensor, "*heads"]


def predicted_attention(
    form: QKForm,
    process: TokenProcess,
    *,
    law: LogitLaw = "gaussian",
    draws: int = 2000,
    generator: torch.Generator | None = None,
) -> PredictedAttention:
    """Where the last token looks and how sharply, without running a model.

    `gaussian` draws rows of logits from the Gaussian with their exact mean and covariance; `exact`
    draws them from their own law, head·tokens numbers a row instead of tokens.  Without a
    `generator` the draws are the same at every call.

    >>> form = QKForm.from_eigenvalues(torch.zeros(2), temperature=1.0)
    >>> predicted_attention(form, TokenProcess.random_walk(4)).entropy
    tensor(1.3863, dtype=torch.float64)
    """
    check_choice("law", law, get_args(LogitLaw))
    if draws < 2:
        raise ConfigError(f"draws must be 2 or more, got {draws}.", hint="2000 is usual.")
    if generator is None:
        generator = torch.Generator(form.query.device).manual_seed(0)
    moments = HeadMoments.of(form, process)
    if law == "exact":
        rows = LogitDraws.of(process, draws, generator).rows(moments, generator)
    else:
        rows = moments.gaussian_rows(draws, generator)
    heads = []
    for logits in rows:
        attention = torch.softmax(logits, -1)
        entropy = attention_entropy(attention)
        parts = ((part.mean(1), part.std(1) / math.sqrt(draws)) for part in (attention, entropy))
        heads.append([value for pair in parts for value in pair])
    stack = form.query.shape[:-2]
    return PredictedAttention(
        *(torch.cat(parts).unflatten(0, stack) if stack else torch.cat(parts)[0]
          for parts in zip(*heads, strict=True))
    )  # fmt: skip


REGIMES: tuple[RegimeName, ...] = get_args(RegimeName)


@dataclass(frozen=True, eq=False)
class Regime:
    """Which tokens a head lets through, and what that is called.

    A token is *on* when its ρ is at least half of the largest ρ.  `uniform`: all are on.  `late`,
    `early`, `middle`: the tokens that are on form one run that reaches the last token, the first,
    or neither.  `scattered`: they do not form such a run.  `vanishing`: the largest ρ is below 0.1.

    >>> form = QKForm.from_xi_eta(10.0, 0.5, dim=128)
    >>> regime = classify(form, TokenProcess.random_walk(64))
    >>> regime.name, regime.count.item()
    ('middle', 13)
    """

    r: Float[Tensor, "*heads"]
    """tr(W)/λ; under the random walk all tokens are on below 2/(T − 1), and |r| > 2 localizes."""
    index: Int[Tensor, "*heads"]
    count: Int[Tensor, "*heads"]
    """How many tokens are on."""
    first: Int[Tensor, "*heads"]
    """Position of the first token that is on, counted from 1."""
    last: Int[Tensor, "*heads"]
    profile: Profile

    @property
    def names(self) -> list[RegimeName]:
        """One name per head, stacks flattened."""
        return [REGIMES[index] for index in self.index.flatten().tolist()]

    @property
    def name(self) -> RegimeName:
        """The name of a single head's regime."""
        if self.index.numel() != 1:
            raise InputError(
                f"this regime describes {self.index.numel()} heads.", hint="use .names instead."
            )
        return self.names[0]


def classify(form: QKForm, process: TokenProcess, *, method: Method = "exact") -> Regime:
    """Name the regime of every head at finite T, from ρ itself.

    Paper: Lemma 2, restated: its indicators are read off ρ_i, so that the boundary points (E13),
    the missing 1/T (E8) and the false uniformity claim (E14) do no harm.

    >>> form = QKForm.from_xi_eta(10.0, 0.5, dim=128)
    >>> regime = classify(form, TokenProcess.random_walk(64))
    >>> regime.name, regime.count.item()
    ('middle', 13)
    """
    profile = propagation(form, process, method=method)
    return regime_of(profile, form.spectrum(process.covariance).r)


def regime_of(profile: Profile, r: Float[Tensor, "*heads"]) -> Regime:
    """Name the regime of heads whose ρ is known at every position."""
    rho, tokens = profile.rho, profile.rho.shape[-1]
    on = is_on(rho)
    count = on.sum(-1)
    first = on.int().argmax(-1) + 1
    last = tokens - on.flip(-1).int().argmax(-1)
    index = torch.full_like(count, REGIMES.index("middle"))
    index[last == tokens] = REGIMES.index("late")
    index[first == 1] = REGIMES.index("early")
    index[count < last - first + 1] = REGIMES.index("scattered")
    index[count == tokens] = REGIMES.index("uniform")
    index[profile.peak < VANISHING] = REGIMES.index("vanishing")
    return Regime(r, index, count, first, last, profile)
