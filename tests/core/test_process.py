"""Token processes: their kernels, their samples, and how they are found again in samples."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from statistics import NormalDist
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from locater import ConfigError, InputError, LocaterError, TokenProcess
from locater.core.process import LongProcess, ProcessName, centered_kernel, squared_norm

SEEDS = st.integers(0, 2**31)
NAN = math.nan
FALSE_ALARMS = 1e-6  # of each statistical test, shared among the numbers it compares


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def draw_covariance(size: int, generator: torch.Generator) -> Tensor:
    mixing = torch.randn(size, size + 2, generator=generator, dtype=torch.float64)
    return mixing @ mixing.mT / size


def kronecker(kernel: Tensor, covariance: Tensor) -> Tensor:
    """Cov of all tokens, stacked one under the other."""
    return torch.kron(kernel.contiguous(), covariance.contiguous())


def columns_of(covariance: Tensor, tokens: int) -> Tensor:
    """Samples whose covariance around zero is exactly the one asked for."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt()
    return (root.mT * math.sqrt(len(covariance))).unflatten(1, (tokens, -1))


def test_named_kernels_are_what_they_are_called() -> None:
    walk = TokenProcess.random_walk(3).kernel
    torch.testing.assert_close(walk, double([[1.0, 1, 1], [1, 2, 2], [1, 2, 3]]))
    stationary = TokenProcess.autoregressive(3, -0.5).kernel
    torch.testing.assert_close(
        stationary, double([[1, -0.5, 0.25], [-0.5, 1, -0.5], [0.25, -0.5, 1]])
    )
    assert torch.equal(TokenProcess.autoregressive(4, 0.0).kernel, torch.eye(4).double())
    assert torch.equal(TokenProcess.independent(4).kernel, torch.eye(4).double())
    covariance, mean = 2 * torch.eye(2), torch.ones(3, 2)
    process = TokenProcess.from_kernel(walk, covariance=covariance, mean=mean)
    assert process.tokens == 3 and process.covariance is covariance and process.mean is mean
    assert TokenProcess.random_walk(2, covariance=covariance).covariance is covariance


@given(tokens=st.integers(2, 12), seed=SEEDS)
def test_the_centered_kernel_is_the_kernel_seen_through_gamma(tokens: int, seed: int) -> None:
    kernel = draw_covariance(tokens, torch.Generator().manual_seed(seed))
    gamma = torch.eye(tokens, dtype=torch.float64) / tokens - 1 / tokens**2
    cross, spread = centered_kernel(kernel)
    torch.testing.assert_close(cross, gamma @ kernel[:, -1])
    torch.testing.assert_close(spread, (gamma @ kernel @ gamma.mT).diagonal())


@pytest.mark.paper("Lemma 1")
@given(tokens=st.integers(2, 64))
def test_the_random_walk_has_the_closed_form_of_the_centered_kernel(tokens: int) -> None:
    position = torch.arange(1, tokens + 1, dtype=torch.float64)
    below = (position - (tokens + 1) / 2) / tokens
    rest = (1 - tokens**-2) / 12  # the same at every position: a centered bridge is stationary
    cross, spread = centered_kernel(TokenProcess.random_walk(tokens).kernel)
    torch.testing.assert_close(cross, below, rtol=0, atol=1e-14)
    torch.testing.assert_close(spread * tokens, below.square() + rest)


@pytest.mark.parametrize("known", range(2, 9))
def test_a_process_of_few_tokens_goes_on_too(known: int) -> None:
    """The first tokens stay, and the next ones are as like as neighbors were."""
    short = TokenProcess.autoregressive(known, 0.5)
    longer = short.continued(12)
    torch.testing.assert_close(longer.kernel[:known, :known].diagonal(), torch.ones(known).double())
    late = longer.kernel[known:, known:]
    torch.testing.assert_close(late.diagonal(), torch.ones(12 - known).double())
    torch.testing.assert_close(late.diagonal(1), torch.full((11 - known,), 0.5).double())


def test_a_truncated_process_is_the_process_of_its_first_tokens() -> None:
    mean = torch.arange(10, dtype=torch.float64).view(5, 2)
    process = TokenProcess(TokenProcess.random_walk(5).kernel, torch.eye(2).double(), mean)
    cut = process.truncate(3)
    assert torch.equal(cut.kernel, TokenProcess.random_walk(3).kernel)
    assert cut.mean is not None and torch.equal(cut.mean, mean[:3])
    assert cut.covariance is process.covariance
    assert TokenProcess.random_walk(5).truncate(5).mean is None
    assert TokenProcess.random_walk(5).truncate(2).tokens == 2


@pytest.mark.statistical  # resolution: about 4 % of a variance
@pytest.mark.parametrize(("phi", "holds"), [(0.6, True), (0.5, False)])
def test_samples_have_the_mean_and_the_covariance_of_the_process(
    phi: float, holds: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    covariance, mean = (
        draw_covariance(2, generator),
        torch.randn(4, 2, generator=generator).double(),
    )
    process = TokenProcess(TokenProcess.autoregressive(4, 0.6).kernel, covariance, mean)
    count = 40_000
    spread = (process.sample(count, generator=generator) - mean).flatten(1)
    kernel = TokenProcess.autoregressive(4, phi).kernel
    expected = kronecker(kernel, covariance)
    own = expected.diagonal()
    mean_error = (own / count).sqrt()
    error = ((own[:, None] * own + expected.square()) / count).sqrt()  # Isserlis
    z = torch.cat(
        ((spread.mean(0) / mean_error), ((spread.mT @ spread / count - expected) / error).flatten())
    )
    limit = NormalDist().inv_cdf(1 - FALSE_ALARMS / (2 * len(z)))
    assert bool((z.abs() < limit).all()) == holds


def test_samples_repeat_with_the_generator_and_fit_any_model() -> None:
    process = TokenProcess.independent(3)
    first, second = (
        process.sample(5, model=4, generator=torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert torch.equal(first, second) and first.dtype == torch.float64
    with_mean = TokenProcess(process.kernel, None, torch.ones(3, 2))
    assert with_mean.sample(1, generator=torch.Generator().manual_seed(7)).shape == (1, 3, 2)


@settings(max_examples=40)
@given(tokens=st.integers(2, 5), model=st.integers(1, 4), seed=SEEDS, keep=st.booleans())
def test_a_kronecker_covariance_is_found_exactly(
    tokens: int, model: int, seed: int, keep: bool
) -> None:
    """Samples that are the columns of a root have K ⊗ Σ itself as their covariance."""
    generator = torch.Generator().manual_seed(seed)
    kernel, covariance = draw_covariance(tokens, generator), draw_covariance(model, generator)
    samples = columns_of(kronecker(kernel, covariance), tokens)
    if keep:
        fitted = TokenProcess.from_samples(samples, centered=False, covariance=covariance)
        torch.testing.assert_close(fitted.kernel, kernel)
        assert fitted.covariance is not None
        torch.testing.assert_close(fitted.covariance, covariance)
    else:
        fitted = TokenProcess.from_samples(samples, centered=False)
        scale = kernel.trace() / tokens
        assert fitted.covariance is not None
        torch.testing.assert_close(fitted.kernel, kernel / scale)
        torch.testing.assert_close(fitted.covariance, covariance * scale)
    assert fitted.mean is None


@settings(max_examples=40)
@given(tokens=st.integers(2, 5), model=st.integers(1, 4), seed=SEEDS)
def test_means_are_taken_off_before_the_covariance_is_found(
    tokens: int, model: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kernel, covariance = draw_covariance(tokens, generator), draw_covariance(model, generator)
    mean = torch.randn(tokens, model, generator=generator, dtype=torch.float64)
    columns = columns_of(kronecker(kernel, covariance), tokens)
    both = torch.cat((columns, -columns))
    unbiased = math.sqrt((len(both) - 1) / len(both))
    fitted = TokenProcess.from_samples(mean + unbiased * both)
    assert fitted.mean is not None and fitted.covariance is not None
    torch.testing.assert_close(fitted.mean, mean)
    expected = kronecker(kernel, covariance)
    torch.testing.assert_close(
        kronecker(fitted.kernel, fitted.covariance), expected, rtol=1e-7, atol=1e-8
    )


@settings(max_examples=25)
@given(tokens=st.integers(2, 4), model=st.integers(2, 4), seed=SEEDS)
def test_a_mixture_of_kernels_is_fitted_by_the_nearest_kronecker_product(
    tokens: int, model: int, seed: int
) -> None:
    """The nearest one is the first singular pair of the rearranged covariance (Van Loan)."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        kronecker(draw_covariance(tokens, generator), draw_covariance(model, generator))
        for _ in range(2)
    ]
    total = parts[0] + parts[1]
    rearranged = total.view(tokens, model, tokens, model).transpose(1, 2).reshape(tokens**2, -1)
    left, sizes, right = torch.linalg.svd(rearranged, full_matrices=False)
    nearest = sizes[0] * torch.outer(left[:, 0], right[0])
    copies = 10  # of every sample, so that the samples' own noise, which is taken off, is small
    samples = columns_of(total, tokens)
    noise = samples.flatten(1).square().sum(1).square().sum() / (len(samples) * total.norm()) ** 2
    fitted = TokenProcess.from_samples(samples.repeat(copies, 1, 1), centered=False, rounds=200)
    assert fitted.covariance is not None and fitted.explained is not None
    product = kronecker(fitted.kernel, fitted.covariance)
    product = product.view(tokens, model, tokens, model).transpose(1, 2).reshape(tokens**2, -1)
    torch.testing.assert_close(product, nearest, rtol=1e-4, atol=1e-4 * float(nearest.abs().amax()))
    share = (sizes[0] ** 2 / sizes.square().sum()).item()
    slack = noise.item() / copies + 1 / (copies * len(samples)) + 1e-6
    assert fitted.explained == pytest.approx(min(1.0, share), rel=2 * slack)


@pytest.mark.statistical  # resolution: about 2 % of the largest entry
@pytest.mark.parametrize(("bias", "holds"), [(0.0, True), (0.05, False)])
def test_sampled_tokens_give_their_process_back(bias: float, holds: bool, seed: int) -> None:
    """Thirty fits give a mean and its standard error; the bias of each is of order 1/samples."""
    generator = torch.Generator().manual_seed(seed)
    kernel = TokenProcess.autoregressive(3, 0.7).kernel  # of trace 3, like every fitted kernel
    covariance = draw_covariance(2, generator)
    mean = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    process, fits = TokenProcess(kernel, covariance, mean), 30
    fitted = [
        TokenProcess.from_samples(process.sample(2000, generator=generator)) for _ in range(fits)
    ]
    rows = []
    for fit in fitted:
        assert fit.covariance is not None and fit.mean is not None
        rows.append(torch.cat([part.flatten() for part in (fit.kernel, fit.covariance, fit.mean)]))
    found = torch.stack(rows)
    expected = torch.cat([part.flatten() for part in (kernel + bias, covariance, mean)])
    varies = found.std(0) > 1e-9
    t = ((found.mean(0) - expected) / found.std(0) * math.sqrt(fits))[varies]
    limit = stats.t.isf(FALSE_ALARMS / (2 * len(t)), fits - 1)
    assert bool((t.abs() < limit).all()) == holds


@pytest.mark.statistical  # resolution: about 0.02 of the share
@pytest.mark.parametrize(
    ("independent", "claimed", "holds"),
    [(0.0, 1.0, True), (4.0, None, True), (4.0, 1.0, False)],
)
def test_the_explained_share_is_that_of_the_nearest_kronecker_product(
    independent: float, claimed: float | None, holds: bool, seed: int
) -> None:
    """Half of the dimensions walk, half may be independent: no single kernel serves both."""
    generator = torch.Generator().manual_seed(seed)
    walk, noise = TokenProcess.random_walk(5).kernel, TokenProcess.independent(5).kernel
    if claimed is None:  # in the span of the two kernels the rearranged covariance is 2 x 2
        gram = double([[(a * b).sum() for b in (walk, noise)] for a in (walk, noise)])
        sizes = double([1.0, independent**2])
        values = torch.linalg.eigvalsh(gram * torch.outer(sizes, sizes) * 2)
        claimed = (values[-1] / values.sum()).item()
    fits, found = 20, []
    for _ in range(fits):
        first = TokenProcess(walk).sample(500, model=2, generator=generator)
        other = TokenProcess(noise).sample(500, model=2, generator=generator)
        samples = torch.cat((first, independent * other), -1) if independent else first
        explained = TokenProcess.from_samples(samples).explained
        assert explained is not None
        found.append(explained)
    shares = double(found)
    limit = stats.t.isf(FALSE_ALARMS / 2, fits - 1) * shares.std() / math.sqrt(fits)
    assert bool((shares.mean() - claimed).abs() <= limit) == holds


def test_float32_samples_and_processes_are_computed_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = TokenProcess.random_walk(3).sample(50, model=2, generator=generator).float()
    fitted = TokenProcess.from_samples(samples)
    assert fitted.covariance is not None and fitted.mean is not None
    assert fitted.kernel.dtype == fitted.covariance.dtype == fitted.mean.dtype == torch.float64
    low = TokenProcess(torch.eye(3), torch.eye(2), torch.ones(3, 2))
    assert low.sample(2, generator=generator).dtype == torch.float64


EYE = torch.eye(3, dtype=torch.float64)
WALK = TokenProcess.random_walk(3)
SAMPLES = torch.ones(4, 3, 2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "error", "message", "hint"),
    [
        (
            lambda: TokenProcess.random_walk(1),
            ConfigError,
            "a process needs at least 2 tokens, got 1.",
            "nothing to choose",
        ),
        (lambda: TokenProcess.autoregressive(0, 0.5), ConfigError, "got 0.", "nothing to choose"),
        (lambda: TokenProcess.independent(-3), ConfigError, "got -3.", "nothing to choose"),
        (
            lambda: TokenProcess.from_kernel(torch.ones(1, 1)),
            InputError,
            "the kernel of a process is (1, 1).",
            "at least 2 tokens",
        ),
        (lambda: TokenProcess(torch.ones(4)), InputError, "process is (4,).", "tokens x tokens"),
        (
            lambda: TokenProcess(torch.ones(3, 4)),
            InputError,
            "kernel is (3, 4), expected 4 x 4.",
            "a kernel is a square symmetric matrix",
        ),
        (
            lambda: TokenProcess(EYE - 2 * EYE.flip(0)),
            InputError,
            "kernel is not positive definite",
            "estimate it from more data",
        ),
        (
            lambda: TokenProcess(EYE + torch.ones(3, 3).triu(1)),
            InputError,
            "kernel is not symmetric.",
            "(C + C.mT) / 2",
        ),
        (lambda: TokenProcess(0 * EYE), InputError, "kernel is zero.", "positive diagonal"),
        (lambda: TokenProcess(NAN * EYE), InputError, "kernel holds NaN", "was made from"),
        (
            lambda: TokenProcess(torch.diag(double([1.0, 1.0, 0.0]))),
            InputError,
            "the kernel leaves the last token without variance.",
            "kernel[-1, -1] must be positive",
        ),
        (lambda: TokenProcess(EYE, -EYE), InputError, "covariance is not positive", "clip them"),
        (
            lambda: TokenProcess(EYE, 0 * EYE),
            InputError,
            "covariance is zero.",
            "positive diagonal",
        ),
        (lambda: TokenProcess(EYE, EYE / 0), InputError, "covariance holds NaN", "was made from"),
        (
            lambda: TokenProcess(EYE, EYE + torch.ones(3, 3).triu(1)),
            InputError,
            "covariance is not symmetric.",
            "(C + C.mT) / 2",
        ),
        (
            lambda: TokenProcess(EYE, torch.ones(2, 3)),
            InputError,
            "covariance is (2, 3), expected 3 x 3.",
            "square symmetric",
        ),
        (
            lambda: TokenProcess(EYE, None, torch.ones(2, 3)),
            InputError,
            "mean is (2, 3) for 3 tokens.",
            "one mean vector per token",
        ),
        (
            lambda: TokenProcess(EYE, EYE, torch.ones(3, 2)),
            InputError,
            "mean has 2 dimensions, covariance 3.",
            "same tokens",
        ),
        (
            lambda: TokenProcess(EYE, None, NAN * EYE),
            InputError,
            "mean holds NaN or infinite values.",
            "check the samples",
        ),
        (lambda: TokenProcess.autoregressive(3, 1.0), ConfigError, "got 1.0.", "random_walk"),
        (lambda: TokenProcess.autoregressive(3, -1.5), ConfigError, "got -1.5.", "random_walk"),
        (lambda: TokenProcess.autoregressive(3, NAN), ConfigError, "got nan.", "random_walk"),
        (lambda: WALK.truncate(1), ConfigError, "cannot keep 1 of 3 tokens.", "at least 2"),
        (lambda: WALK.truncate(4), ConfigError, "cannot keep 4 of 3 tokens.", "at least 2"),
        (
            lambda: WALK.sample(0, model=2, generator=torch.Generator()),
            ConfigError,
            "cannot draw 0 sequences in 2 dimensions.",
            "count >= 1",
        ),
        (
            lambda: WALK.sample(3, generator=torch.Generator()),
            ConfigError,
            "cannot draw 3 sequences in None dimensions.",
            "model= for a process without a covariance",
        ),
        (
            lambda: TokenProcess.from_samples(SAMPLES[:1]),
            InputError,
            "samples are (1, 3, 2).",
            "at least 2 samples",
        ),
        (
            lambda: TokenProcess.from_samples(SAMPLES[0]),
            InputError,
            "samples are (3, 2).",
            "model)",
        ),
        (
            lambda: TokenProcess.from_samples(SAMPLES * NAN),
            InputError,
            "samples hold NaN or infinite values.",
            "leave padded sequences out",
        ),
        (
            lambda: TokenProcess.from_samples(SAMPLES),
            InputError,
            "all samples are equal.",
            "no covariance to estimate",
        ),
    ],
)
def test_processes_that_cannot_be_are_refused(
    call: Callable[[], object], error: type[LocaterError], message: str, hint: str
) -> None:
    with pytest.raises(error, match=f"{re.escape(message)}(.|\n)*hint: .*{re.escape(hint)}"):
        call()


def test_the_correlation_of_neighbors_keeps_all_its_digits() -> None:
    assert TokenProcess.autoregressive(3, 0.9).kernel[0].tolist() == [1.0, 0.9, 0.9**2]


def test_traces_keep_every_position_s_variance_and_the_average_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(4, 3, generator=generator, dtype=torch.float64).exp()
    samples = torch.randn(50, 4, 3, generator=generator, dtype=torch.float64) * scale
    fitted = TokenProcess.from_samples(samples, fit="traces")
    assert fitted.covariance is not None
    spread = samples - samples.mean(0)
    average = torch.einsum("ntm,ntk->mk", spread, spread) / (49 * 4)
    torch.testing.assert_close(fitted.covariance, average)
    torch.testing.assert_close(
        fitted.kernel.diagonal() * average.trace(), spread.square().sum((0, 2)) / 49
    )
    nearest = TokenProcess.from_samples(samples)
    assert nearest.explained is not None and fitted.explained is not None
    assert fitted.explained < nearest.explained  # which is what least squares are for


def test_traces_find_a_kronecker_covariance_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    kernel, sigma = draw_covariance(4, generator), draw_covariance(3, generator)
    fitted = TokenProcess.from_samples(
        columns_of(kronecker(kernel, sigma), 4), centered=False, fit="traces"
    )
    assert fitted.covariance is not None
    torch.testing.assert_close(
        kronecker(fitted.kernel, fitted.covariance), kronecker(kernel, sigma)
    )


@pytest.mark.statistical
@pytest.mark.parametrize("is_centered", [False, True])
def test_the_norm_of_a_covariance_is_right_however_few_samples_there_are(
    is_centered: bool, seed: int
) -> None:
    values = torch.linspace(0.2, 3.0, 40, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    ours, plain = [], []
    for _ in range(400):
        drawn = torch.randn(12, 40, generator=generator, dtype=torch.float64) * values.sqrt()
        drawn = drawn - drawn.mean(0) if is_centered else drawn
        ours.append(squared_norm(drawn, 12 - is_centered).item())
        plain.append((drawn.mT @ drawn / (12 - is_centered)).square().sum().item())
    limit = NormalDist().inv_cdf(1 - 1e-6 / 2)
    for found, holds in ((ours, True), (plain, False)):  # its own norm is 3 times too large
        sample = torch.tensor(found)
        error = sample.std() / math.sqrt(len(sample))
        assert (abs(sample.mean() - values.square().sum()) < limit * error) == holds


@pytest.mark.parametrize("name", get_args(ProcessName))
def test_a_process_by_name_is_a_covariance_without_being_asked(name: str) -> None:
    process = TokenProcess.named(name, 12, phi=-0.7)
    assert torch.linalg.eigvalsh(process.kernel)[0] > 0
    assert TokenProcess.from_kernel(process.kernel).tokens == 12  # which checks it


def test_names_are_those_of_the_constructors() -> None:
    for name, made in (
        ("random-walk", TokenProcess.random_walk(5)),
        ("autoregressive", TokenProcess.autoregressive(5, 0.3)),
        ("independent", TokenProcess.independent(5)),
    ):
        assert torch.equal(TokenProcess.named(name, 5, phi=0.3).kernel, made.kernel)
    walk = TokenProcess.random_walk(5).kernel
    unit = TokenProcess.named("unit-walk", 5).kernel
    assert unit.trace().item() == pytest.approx(5.0)
    torch.testing.assert_close(unit / unit[0, 0], walk)
    with pytest.raises(ConfigError, match=r"unknown process 'dance'.\nhint: choose one of: unit-w"):
        TokenProcess.named("dance", 5)


def test_a_kernel_that_is_known_to_be_one_is_not_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cholesky_ex", "eigh", "eigvalsh"):
        monkeypatch.setattr(torch.linalg, name, None)
    process = TokenProcess.named("unit-walk", 2048)
    assert process.truncate(1024).tokens == 1024
    with pytest.raises(TypeError):
        TokenProcess.from_kernel(process.kernel)  # a kernel of one's own is


def test_a_kernel_with_a_small_negative_eigenvalue_is_told_from_a_rounded_one() -> None:
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))
    values = torch.linspace(1, 2, 6, dtype=torch.float64)
    for least, is_one in ((-1e-7, True), (-1e-5, False)):
        values[0] = least
        kernel = (basis * values) @ basis.mT
        if is_one:
            assert TokenProcess.from_kernel((kernel + kernel.mT) / 2).tokens == 6
        else:
            with pytest.raises(InputError, match="kernel is not positive definite"):
                TokenProcess.from_kernel((kernel + kernel.mT) / 2)


@pytest.mark.parametrize("name", ["unit-walk", "random-walk", "autoregressive", "independent"])
@pytest.mark.parametrize("tokens", [2, 7, 40])
def test_a_long_process_is_the_same_without_its_matrix(name: str, tokens: int) -> None:
    long, dense = LongProcess(name, tokens, 0.7), TokenProcess.named(name, tokens, phi=0.7)
    torch.testing.assert_close(long.last, dense.kernel[:, -1])
    torch.testing.assert_close(long.diagonal(), dense.kernel.diagonal())
    torch.testing.assert_close(long.means(), dense.kernel.mean(1))
    for ours, theirs in zip(centered_kernel(long), centered_kernel(dense.kernel), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=1e-9)
    count, generator = 200_000, torch.Generator().manual_seed(0)
    drawn = long.paths(torch.randn(count, tokens, generator=generator, dtype=torch.float64))
    found = drawn.mT @ drawn / count
    size = dense.kernel.diagonal().sqrt()
    error = (size[:, None] * size * math.sqrt(2 / count)).clamp_min(1e-12)
    assert ((found - dense.kernel).abs() < 6 * error).all()
