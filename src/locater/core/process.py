"""Gaussian token processes: a kernel over time ⊗ a covariance over dimensions, around means."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.spectrum import check_covariance, semidefinite_root
from locater.errors import ConfigError, InputError, check_choice
from locater.notebook import Shown

Fit = Literal["least_squares", "traces"]
ProcessName = Literal["unit-walk", "random-walk", "autoregressive", "independent"]
DENSE_TOKENS = 8192
"""Up to so many tokens the kernel of a named process is written out."""


@dataclass(frozen=True, eq=False)
class LongProcess:
    """A named process of many tokens, Σ = I, of whose kernel no tokens × tokens matrix is made.

    >>> process = LongProcess("unit-walk", 3)
    >>> process.last, process.diagonal()[-1].item()
    (tensor([0.5000, 1.0000, 1.5000], dtype=torch.float64), 1.5)
    """

    name: ProcessName
    tokens: int
    phi: float = 0.9
    covariance: ClassVar[None] = None  # Σ = I
    mean: ClassVar[None] = None  # zero

    @property
    def _step(self) -> Float[Tensor, " tokens"]:
        return torch.arange(1, self.tokens + 1, dtype=torch.float64)

    @property
    def _scale(self) -> float:
        return 2 / (self.tokens + 1) if self.name == "unit-walk" else 1.0

    def diagonal(self) -> Float[Tensor, " tokens"]:
        """The variances of the tokens."""
        if self.name in ("unit-walk", "random-walk"):
            return self._scale * self._step
        return torch.ones(self.tokens, dtype=torch.float64)

    @property
    def last(self) -> Float[Tensor, " tokens"]:
        """The kernel's last column."""
        if self.name == "autoregressive":
            return self._step.new_tensor(self.phi) ** (self.tokens - self._step)
        if self.name == "independent":
            return (self._step == self.tokens).double()
        return self.diagonal()

    def means(self) -> Float[Tensor, " tokens"]:
        """The mean of every row."""
        step, tokens = self._step, self.tokens
        if self.name == "independent":
            return torch.full_like(step, 1 / tokens)
        if self.name == "autoregressive":
            phi = step.new_tensor(self.phi)
            sums = (1 + phi - phi**step - phi ** (tokens + 1 - step)) / (1 - phi)
            return sums / tokens
        return self._scale * (step * (step + 1) / 2 + step * (tokens - step)) / tokens

    def paths(self, normal: Float[Tensor, "draws tokens"]) -> Float[Tensor, "draws tokens"]:
        """Tokens in one dimension, from as many independent numbers."""
        if self.name in ("unit-walk", "random-walk"):
            return normal.cumsum(-1) * math.sqrt(self._scale)
        if self.name == "autoregressive":
            found, rest = normal.clone(), math.sqrt(1 - self.phi**2)
            for place in range(1, self.tokens):
                found[:, place] = self.phi * found[:, place - 1] + rest * normal[:, place]
            return found
        return normal


@dataclass(frozen=True, eq=False, repr=False)
class TokenProcess(Shown):
    """Tokens x_t = m_t + y_t with Gaussian y and Cov(y_s, y_t) = kernel[s, t] · covariance.

    `covariance=None` is Σ = I in any number of dimensions, `mean=None` is m = 0.

    >>> process = TokenProcess.random_walk(4)
    >>> process.tokens, process.kernel[1, 3].item()
    (4, 2.0)
    >>> process.sample(10, model=3, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([10, 4, 3])
    """

    kernel: Float[Tensor, "tokens tokens"]
    covariance: Float[Tensor, "model model"] | None = None
    mean: Float[Tensor, "tokens model"] | None = None
    explained: float | None = None
    """Share of the samples' covariance that kernel ⊗ covariance accounts for, where estimated."""
    is_known: InitVar[bool] = False
    """The kernel is one by construction: it is not factored to find out."""

    _picture = ("line", "position:Q", "variance:Q", "kind:N")

    def _line(self) -> str:
        return f"{self.tokens} tokens"

    def _table(self) -> list[dict[str, Any]]:
        variances = self.kernel.diagonal().tolist()
        return [{"position": at, "variance": one} for at, one in enumerate(variances, 1)]

    def __post_init__(self, is_known: bool) -> None:
        if self.kernel.ndim != 2 or self.kernel.shape[0] < 2:
            raise InputError(
                f"the kernel of a process is {tuple(self.kernel.shape)}.",
                hint="it is tokens x tokens, with at least 2 tokens to choose among.",
            )
        if not is_known:
            check_covariance(self.kernel, what="kernel")
        if self.kernel[-1, -1].item() <= 0:
            raise InputError(
                "the kernel leaves the last token without variance.",
                hint="the last token is the query; kernel[-1, -1] must be positive.",
            )
        if self.covariance is not None:
            check_covariance(self.covariance)
        if self.mean is not None:
            if self.mean.ndim != 2 or self.mean.shape[0] != self.tokens:
                raise InputError(
                    f"mean is {tuple(self.mean.shape)} for {self.tokens} tokens.",
                    hint="give one mean vector per token: (tokens, model).",
                )
            if self.covariance is not None and self.covariance.shape[0] != self.mean.shape[1]:
                raise InputError(
                    f"mean has {self.mean.shape[1]} dimensions, covariance {len(self.covariance)}.",
                    hint="both belong to the same tokens.",
                )
            if not bool(torch.isfinite(self.mean).all()):
                raise InputError("mean holds NaN or infinite values.", hint="check the samples.")

    @property
    def tokens(self) -> int:
        """T, the number of tokens; the last one asks."""
        return self.kernel.shape[0]

    @classmethod
    def named(
        cls, name: str, tokens: int, *, phi: float = 0.9, covariance: Tensor | None = None
    ) -> TokenProcess:
        """The process of a name; `phi` belongs to `autoregressive`.

        `unit-walk` is the random walk scaled to unit variance on average, as LayerNorm leaves
        tokens: a kernel of trace T.

        >>> TokenProcess.named("unit-walk", 3).kernel.diagonal()
        tensor([0.5000, 1.0000, 1.5000], dtype=torch.float64)
        """
        check_choice("process", name, get_args(ProcessName))
        if tokens < 2:
            raise ConfigError(
                f"a process needs at least 2 tokens, got {tokens}.",
                hint="with one token attention has nothing to choose.",
            )
        if not -1 < phi < 1 and name == "autoregressive":
            raise ConfigError(
                f"phi must lie strictly between -1 and 1, got {phi}.",
                hint="phi = 1 is the random walk: TokenProcess.random_walk.",
            )
        step = torch.arange(1, tokens + 1, dtype=torch.float64)
        if name == "independent":
            kernel = torch.eye(tokens, dtype=torch.float64)
        elif name == "autoregressive":
            kernel = step.new_tensor(phi) ** (step[:, None] - step).abs()
        else:
            kernel = torch.minimum(step[:, None], step)
            kernel *= 2 / (tokens + 1) if name == "unit-walk" else 1
        return cls(kernel, covariance, is_known=True)

    @classmethod
    def random_walk(cls, tokens: int, *, covariance: Tensor | None = None) -> TokenProcess:
        """x_{t+1} ~ N(x_t, Σ) from the origin, so Cov(x_s, x_t) = min(s, t) Σ.

        Paper: Assumption 1.
        """
        return cls.named("random-walk", tokens, covariance=covariance)

    @classmethod
    def autoregressive(
        cls, tokens: int, phi: float, *, covariance: Tensor | None = None
    ) -> TokenProcess:
        """Stationary AR(1) tokens: Cov(x_s, x_t) = φ^|s−t| Σ."""
        return cls.named("autoregressive", tokens, phi=phi, covariance=covariance)

    @classmethod
    def independent(cls, tokens: int, *, covariance: Tensor | None = None) -> TokenProcess:
        """Tokens that know nothing of each other: Cov(x_s, x_t) = [s = t] Σ."""
        return cls.named("independent", tokens, covariance=covariance)

    @classmethod
    def from_kernel(
        cls,
        kernel: Float[Tensor, "tokens tokens"],
        *,
        covariance: Tensor | None = None,
        mean: Tensor | None = None,
    ) -> TokenProcess:
        """Take any positive definite kernel."""
        return cls(kernel, covariance, mean)

    @classmethod
    def from_samples(
        cls,
        samples: Float[Tensor, "samples tokens model"],
        *,
        covariance: Float[Tensor, "model model"] | None = None,
        centered: bool = True,
        fit: Fit = "least_squares",
        rounds: int = 20,
    ) -> TokenProcess:
        """Fit means, kernel and covariance to sequences.

        `least_squares` makes K ⊗ Σ the nearest Kronecker product to the samples' covariance, which
        is never formed, by alternating; large dimensions decide.  `traces` matches moments instead:
        Σ is the covariance of an average token and K[s, t] = E⟨y_s, y_t⟩/tr Σ, so every position
        keeps its variance also where the covariance is no Kronecker product.  The kernel's trace is
        `tokens`.  A given `covariance` is kept, and `centered=False` takes the means to be zero.

        >>> walks = TokenProcess.random_walk(3).sample(
        ...     4000, model=8, generator=torch.Generator().manual_seed(0)
        ... )
        >>> fitted = TokenProcess.from_samples(walks)
        >>> (fitted.kernel[0, 2] / fitted.kernel[0, 0]).round(decimals=1).item()
        1.0
        """
        samples = samples.double()
        if samples.ndim != 3 or samples.shape[0] < 2:
            raise InputError(
                f"samples are {tuple(samples.shape)}.",
                hint="give (samples, tokens, model) with at least 2 samples, better thousands.",
            )
        if not bool(torch.isfinite(samples).all()):
            raise InputError(
                "samples hold NaN or infinite values.", hint="leave padded sequences out."
            )
        mean = samples.mean(0) if centered else None
        spread = samples - mean if mean is not None else samples
        freedom = len(samples) - 1 if centered else len(samples)
        if not bool(spread.any()):
            raise InputError("all samples are equal.", hint="there is no covariance to estimate.")
        check_choice("fit", fit, get_args(Fit))
        rounds = rounds if fit == "least_squares" else 0
        kernel, sigma = _kronecker(spread, covariance, freedom, rounds)
        explained = _explained(spread, kernel, sigma, freedom)
        return cls(_clipped(kernel), _clipped(sigma), mean, explained)

    def truncate(self, tokens: int) -> TokenProcess:
        """The process of the first tokens: what a query there sees under a causal mask."""
        if not 2 <= tokens <= self.tokens:
            raise ConfigError(
                f"cannot keep {tokens} of {self.tokens} tokens.", hint="keep at least 2 of them."
            )
        mean = None if self.mean is None else self.mean[:tokens]
        return replace(self, kernel=self.kernel[:tokens, :tokens], mean=mean, is_known=True)

    def continued(self, tokens: int, *, first: int = 4) -> TokenProcess:
        """The same process at another length: shorter, or longer as its late part goes on.

        The first tokens keep their means and what they have in common with each late token.  Among
        the others the kernel becomes a function of the distance, which beyond the distances that
        were seen stays where it was over the last quarter of them; means stay at those of the last
        quarter.

        >>> process = TokenProcess.autoregressive(16, 0.5).continued(64)
        >>> process.tokens, round(process.kernel[30, 31].item(), 6)
        (64, 0.5)
        """
        if tokens <= self.tokens:
            return self.truncate(tokens)
        first = min(first, self.tokens - 2)  # two others at least, for a distance between them
        known, late = self.tokens, max(self.tokens * 3 // 4, first)
        inner = self.kernel.double()[first:, first:]
        by_lag = torch.stack([inner.diagonal(lag).mean() for lag in range(len(inner))])
        quarter = max(1, len(by_lag) // 4)
        by_lag[-quarter:] = by_lag[-quarter:].mean()
        lag = torch.arange(tokens)
        distance = (lag[:, None] - lag).abs().clamp_max(len(by_lag) - 1)
        kernel = by_lag[distance]
        ahead = self.kernel.double()[:first, late:].mean(1)
        kernel[:first] = ahead[:, None]
        kernel[:first, :known] = self.kernel.double()[:first]
        kernel[:, :first] = kernel[:first].mT
        mean = None
        if self.mean is not None:
            tail = self.mean[late:].mean(0).expand(tokens - known, -1)
            mean = torch.cat((self.mean, tail))
        return replace(self, kernel=_clipped(kernel), mean=mean, is_known=True)

    def sample(
        self, count: int, *, generator: torch.Generator, model: int | None = None
    ) -> Float[Tensor, "count tokens model"]:
        """Draw token sequences, in float64 and on the kernel's device."""
        known = self.covariance if self.covariance is not None else self.mean
        model = model if known is None else known.shape[-1]
        if model is None or count < 1:
            raise ConfigError(
                f"cannot draw {count} sequences in {model} dimensions.",
                hint="give count >= 1, and model= for a process without a covariance.",
            )
        options: dict[str, Any] = {"dtype": torch.float64, "device": self.kernel.device}
        noise = torch.randn(count, self.tokens, model, generator=generator, **options)
        tokens = semidefinite_root(self.kernel.double()) @ noise
        if self.covariance is not None:
            tokens = tokens @ semidefinite_root(self.covariance.double()).mT
        return tokens if self.mean is None else tokens + self.mean.double()


def centered_kernel(
    kernel: Float[Tensor, "tokens tokens"] | LongProcess,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """u_i = Σ_j γ_j K[j, T] and q_i = γᵀ K γ, with γ = e_i/T − 1/T² (Section 2)."""
    if isinstance(kernel, LongProcess):
        row, last = kernel.means(), kernel.last
    else:
        row, last = kernel.mean(1), kernel[:, -1]
    tokens = len(last)
    cross = (last - row[-1]) / tokens
    spread = (kernel.diagonal() - 2 * row + row.mean()) / tokens**2
    return cross, spread.clamp_min(0)


def _kronecker(
    spread: Float[Tensor, "samples tokens model"],
    covariance: Float[Tensor, "model model"] | None,
    freedom: int,
    rounds: int,
) -> tuple[Float[Tensor, "tokens tokens"], Float[Tensor, "model model"]]:
    """K and Σ with the traces of the samples' covariance, then so many rounds of least squares."""
    count, tokens, _ = spread.shape
    by_token = spread.transpose(0, 1).flatten(1).contiguous()
    flat = by_token.view(tokens * count, -1)
    sigma = flat.mT @ flat / (freedom * tokens) if covariance is None else covariance.double()
    kernel = by_token @ by_token.mT / (freedom * sigma.trace())
    for _ in range(rounds):
        previous = kernel
        kernel = (flat @ sigma).view(tokens, -1) @ by_token.mT
        kernel = (kernel + kernel.mT) / (2 * freedom * sigma.square().sum())
        if covariance is None:
            kernel = kernel * (tokens / kernel.trace())
            mixed = (kernel @ by_token).view_as(flat)
            sigma = mixed.mT @ flat / (freedom * kernel.square().sum())
            sigma = (sigma + sigma.mT) / 2
        if torch.allclose(kernel, previous, rtol=1e-8, atol=1e-10 * float(kernel.abs().amax())):
            break
    return kernel, sigma


def _clipped(matrix: Float[Tensor, "size size"]) -> Float[Tensor, "size size"]:
    """Without the small negative eigenvalues that least squares may leave."""
    values, vectors = torch.linalg.eigh(matrix)
    return matrix if values[0] >= 0 else (vectors * values.clamp_min(0)) @ vectors.mT


def squared_norm(flat: Float[Tensor, "samples values"], freedom: int) -> Tensor:
    """‖C‖²_F of the covariance, without what the noise of few samples adds to that of their own.

    Unbiased for Gaussian samples; `freedom` is their number, less one where they were centered.
    """
    squares = torch.zeros((), dtype=torch.float64, device=flat.device)
    for block in flat.split(1024):
        squares += (block @ flat.mT).square().sum()
    trace = flat.square().sum() / freedom
    shrink = freedom**2 / max((freedom - 1) * (freedom + 2), 1)
    return shrink * (squares / freedom**2 - trace.square() / freedom)


def _explained(
    spread: Float[Tensor, "samples tokens model"],
    kernel: Float[Tensor, "tokens tokens"],
    sigma: Float[Tensor, "model model"],
    freedom: int,
) -> float:
    """⟨C, K⊗Σ⟩² / (‖C‖² ‖K⊗Σ‖²); NaN where the samples are too few to tell."""
    norm = squared_norm(spread.flatten(1), freedom)
    if not norm > 0:
        return math.nan
    product = torch.einsum("nsm,ntm->st", (spread @ sigma), spread).mul(kernel).sum() / freedom
    model_norm = kernel.square().sum() * sigma.square().sum()
    return min(1.0, (product.square() / (norm * model_norm)).item())


_QUANTILES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, eq=False)
class Gaussianity:
    """Shape of the law of each feature, over samples, and of all standardized features together."""

    skewness: Float[Tensor, " features"]
    excess_kurtosis: Float[Tensor, " features"]
    """0 for a Gaussian, 3 for a Laplace law; its standard error for Gaussians is √(24/samples)."""
    samples: int
    quantiles: dict[float, float]
    """Probability → quantile of the standardized features; compare with a Gaussian's."""

    @property
    def statistic(self) -> Float[Tensor, " features"]:
        """Jarque and Bera's n (skewness²/6 + kurtosis²/24), χ² with 2 degrees for a Gaussian."""
        return self.samples * (self.skewness.square() / 6 + self.excess_kurtosis.square() / 24)

    def rejected(self, level: float = 0.01) -> float:
        """Share of features that the test at `level` finds not Gaussian."""
        return (self.statistic > -2 * math.log(level)).double().mean().item()


def gaussianity(samples: Float[Tensor, "samples features"]) -> Gaussianity:
    """Test every feature; constant features are left out.

    >>> generator = torch.Generator().manual_seed(0)
    >>> gaussianity(torch.randn(4000, 50, generator=generator)).rejected() < 0.1
    True
    >>> gaussianity(torch.rand(4000, 50, generator=generator)).rejected()
    1.0
    """
    samples = samples.double()
    if samples.ndim != 2 or samples.shape[0] < 8:
        raise InputError(
            f"samples are {tuple(samples.shape)}.", hint="give (samples, features), 8 or more."
        )
    spread = samples - samples.mean(0)
    deviation = spread.square().mean(0).sqrt()
    alive = deviation > 1e-9 * deviation.amax()
    if not bool(alive.any()):
        raise InputError("every feature is constant.", hint="there is no law to look at.")
    unit = spread[:, alive] / deviation[alive]
    probability = torch.tensor(_QUANTILES, dtype=torch.float64, device=unit.device)
    ordered = unit.flatten().sort().values
    place = (probability * (len(ordered) - 1)).round().long()
    return Gaussianity(
        unit.pow(3).mean(0),
        unit.pow(4).mean(0) - 3,
        len(samples),
        dict(zip(_QUANTILES, ordered[place].tolist(), strict=True)),
    )


def random_projections(
    samples: Float[Tensor, "samples features"], directions: int, generator: torch.Generator
) -> Float[Tensor, "samples directions"]:
    """Samples along random directions: for the law of sums over dimensions."""
    shape = (samples.shape[1], directions)
    random = torch.randn(shape, generator=generator, dtype=samples.dtype).to(samples.device)
    return samples @ (random / random.norm(dim=0))
