"""A thousand random laws of the score: the exact ρ against references that share no code with it.

Whatever the law, ρ = E over the query of a normal probability, because the score is Gaussian given
the query.  With one dimension that is an integral, done by mpmath; with more it is averaged over
drawn queries; with ten weights or more the Fourier integral of Davies (1973) has it to 1e-12, where
its sum is short enough.  The moments of keys and query are written out position by position.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from statistics import NormalDist

import mpmath
import numpy as np
import pytest
import torch
from scipy import special

from locater import QKForm, Rotary, TokenProcess, propagation

pytestmark = pytest.mark.drill
Draw = np.random.Generator  # noqa: TID251  (what checks torch's numbers does not use them)
CASES, POSITIONS = 1_000, 2
Z = -NormalDist().inv_cdf(1e-6 / (2 * CASES * POSITIONS))
"""One false alarm in a million runs of all."""


@dataclass(frozen=True)
class Case:
    """A form, its tokens, and the size that was taken out of the form's own numbers."""

    form: QKForm
    process: TokenProcess
    size: float

    @classmethod
    def drawn(cls, seed: int) -> Case:
        draw = np.random.default_rng(seed)  # noqa: TID251
        head = int(2 ** draw.uniform(0, 6.02))
        model = head + int(draw.integers(0, 9))
        tokens = int(draw.choice([2, 3, int(draw.integers(4, 40)), int(draw.integers(40, 301))]))
        rank = head if draw.random() < 0.8 else int(draw.integers(1, head + 1))

        def normal(*shape: int) -> torch.Tensor:
            return torch.from_numpy(draw.normal(size=shape))

        def factor() -> torch.Tensor:
            return normal(head, rank) @ normal(rank, model) / math.sqrt(model * rank)

        size = 10 ** (draw.uniform(-3, 3) if draw.random() < 0.8 else draw.uniform(-140, 140))
        tilt = 10 ** draw.uniform(-3, 3)
        form = QKForm(
            factor() * (math.sqrt(size) * tilt),
            factor() * (math.sqrt(size) / tilt),
            math.sqrt(head),
            query_bias=normal(head) * math.sqrt(size) * tilt if draw.random() < 0.4 else None,
            key_bias=normal(head) * math.sqrt(size) / tilt if draw.random() < 0.4 else None,
            rotary=Rotary(normal(head // 2).abs(), "half")
            if head > 1 and draw.random() < 0.4
            else None,
        )
        mixing = normal(tokens, tokens) / math.sqrt(tokens)
        thin = normal(tokens, 1) @ normal(1, tokens) / tokens
        kernel = {
            0: TokenProcess.random_walk(tokens).kernel,
            1: TokenProcess.autoregressive(tokens, phi=0.99).kernel,
            2: torch.eye(tokens, dtype=torch.float64),
            3: mixing @ mixing.mT,
            4: thin @ thin.mT + 10 ** draw.uniform(-14, -2) * mixing @ mixing.mT,
        }[int(draw.integers(5))].double()
        color = normal(model, model) / math.sqrt(model)
        process = TokenProcess(
            (kernel + kernel.mT) / 2,
            color @ color.mT if draw.random() < 0.4 else None,
            normal(tokens, model) if draw.random() < 0.4 else None,
        )
        return cls(form, process, size)


def turned(vectors: np.ndarray, frequencies: np.ndarray | None, position: int) -> np.ndarray:
    """Columns of (head, …), turned as halves of the head by position × frequency."""
    if frequencies is None:
        return vectors
    pairs, half = len(frequencies), len(vectors) // 2
    angle = (position * frequencies).reshape(-1, *[1] * (vectors.ndim - 1))
    first, second = vectors[:pairs], vectors[half : half + pairs]
    out = vectors.copy()
    out[:pairs] = first * np.cos(angle) - second * np.sin(angle)
    out[half : half + pairs] = second * np.cos(angle) + first * np.sin(angle)
    return out


@dataclass(frozen=True)
class Law:
    """score = 1/T + b·q: q = query + first·ξ, b = key + shared·ξ + free·ζ, ξ and ζ standard."""

    base: float
    query: np.ndarray
    key: np.ndarray
    first: np.ndarray
    shared: np.ndarray
    free: np.ndarray
    size: float

    @classmethod
    def of(cls, case: Case, position: int) -> Law:
        """Position by position from the definition, with factors of size one."""
        form, process = case.form, case.process
        tokens, (head, model) = process.tokens, form.query.shape
        sizes = [float(part.abs().max()) or 1.0 for part in (form.query, form.key)]
        query, key = form.query.numpy() / sizes[0], form.key.numpy() / sizes[1]
        biases = [
            np.zeros(head) if bias is None else bias.numpy() / one
            for bias, one in zip((form.query_bias, form.key_bias), sizes, strict=True)
        ]
        turns = None if form.rotary is None else form.rotary.frequencies.numpy()
        sigma = np.eye(model) if process.covariance is None else process.covariance.numpy()
        mean = np.zeros((tokens, model)) if process.mean is None else process.mean.numpy()
        gamma = -np.ones(tokens) / tokens**2
        gamma[position] += 1 / tokens
        root, time_root = (_root(part) for part in (sigma, process.kernel.numpy()))
        # tokens = mean + time_root · noise · rootᵀ; a column for every number of the noise
        ask = turned(query @ root, turns, tokens)
        asks = np.einsum("t,hm->htm", time_root[-1], ask).reshape(head, -1)
        sees, see = np.zeros((head, tokens, model)), np.zeros(head)
        for j in range(tokens):
            seen = turned(key @ root, turns, j + 1)
            sees += gamma[j] * time_root[j][None, :, None] * seen[:, None, :]
            see += gamma[j] * turned(key @ mean[j] + biases[1], turns, j + 1)
        both = np.concatenate((asks, sees.reshape(head, -1)))
        lower = np.linalg.qr(both.T, mode="r").T
        lower = np.pad(lower, ((0, 0), (0, max(0, 2 * head - lower.shape[1]))))
        return cls(
            1 / tokens,
            turned(query @ mean[-1] + biases[0], turns, tokens),
            see,
            lower[:head, :head],
            lower[head:, :head],
            lower[head:, head:],
            sizes[0] * sizes[1] / form.temperature,
        )

    def given(self, noise: np.ndarray) -> np.ndarray:
        """P(0 ≤ score ≤ 1 | query) for rows of ξ."""
        query = self.query + noise @ self.first.T
        center = self.base + self.size * (query * (self.key + noise @ self.shared.T)).sum(-1)
        spread = self.size * np.linalg.norm(query @ self.free, axis=-1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inside = special.ndtr((1 - center) / spread) - special.ndtr(-center / spread)
        return np.where(spread > 0, inside, (center >= 0) & (center <= 1))

    def averaged(self, draws: int, draw: Draw) -> tuple[float, float]:
        """Mean over drawn queries, and how far it may be off (Maurer and Pontil 2009)."""
        parts = [
            self.given(draw.normal(size=(min(50_000, draws - start), len(self.query))))
            for start in range(0, draws, 50_000)
        ]
        values, level = np.concatenate(parts), Z**2 / 2 + math.log(2)
        slack = math.sqrt(2 * values.var(ddof=1) * level / draws) + 7 * level / (3 * (draws - 1))
        return float(values.mean()), slack

    def integrated(self) -> float:
        """For a head of one dimension, with 30 digits."""
        first, shared, free = (float(part[0, 0]) for part in (self.first, self.shared, self.free))
        query, key, size = float(self.query[0]), float(self.key[0]), self.size
        root2 = mpmath.sqrt(2)

        def density(noise: mpmath.mpf) -> mpmath.mpf:
            value = query + first * noise
            center = self.base + size * value * (key + shared * noise)
            spread = abs(size * value * free) * root2
            if spread == 0:
                inside = mpmath.mpf(0 <= center <= 1)
            else:
                inside = (mpmath.erf((1 - center) / spread) + mpmath.erf(center / spread)) / 2
            return mpmath.npdf(noise) * inside

        # where the query is zero, where the center is 0 or 1, and around: the integrand turns there
        bends = {0.0, *(-query / first for _ in (1,) if first)}
        for level in (0.0, 1.0):
            terms = [size * first * shared, size * (query * shared + first * key),
                     self.base + size * query * key - level]  # fmt: skip
            bends |= {root.real for root in np.roots(terms) if abs(root.imag) < 1e-9}
        near = [b + s * 10.0**-k for b in bends for k in range(12) for s in (-1, 0, 1)]
        ends = sorted({e for e in (-9.0, *range(-8, 9), 9.0, *near) if abs(e) <= 9})
        with mpmath.workdps(30):
            return float(mpmath.quad(density, ends, maxdegree=5))

    def transformed(self) -> float | None:
        """By the Fourier integral; None where the sum would be long or the tail is slow."""
        head = len(self.query)
        joint = np.block([[self.first, np.zeros_like(self.free)], [self.shared, self.free]])
        pairing = np.kron([[0, 0.5], [0.5, 0]], np.eye(head)) * self.size
        weights, vectors = np.linalg.eigh(joint.T @ pairing @ joint)
        mean = np.concatenate((self.query, self.key))
        linear = 2 * (mean @ pairing @ joint) @ vectors
        constant = self.base + mean @ pairing @ mean
        spread = math.sqrt(2 * (weights**2).sum() + (linear**2).sum())
        if head < 5 or not 1e-2 < spread < 1e2 or abs(weights[[4, -5]]).min() < 1e-2 * spread:
            return None
        reach = math.log(2 / 1e-14)
        side = 2 * spread * math.sqrt(reach) + 2 * np.abs(weights).max() * reach
        center = constant + weights.sum()
        step = 2 * math.pi / (max(center, 1 - center) + side + 1)
        total, start = step / (2 * math.pi), 1
        while start < 2_000_000:
            t = step * np.arange(start, start + 4096)
            gap = 1 - 2j * weights * t[:, None]
            exponent = 1j * constant * t - np.log(gap).sum(-1) / 2
            exponent -= (linear**2 * t[:, None] ** 2 / (2 * gap)).sum(-1)
            total += (
                step / math.pi * (np.exp(exponent) * (1 - np.exp(-1j * t)) / (1j * t)).real.sum()
            )
            start += 4096
            if abs(np.exp(exponent[-1])) < 1e-14:
                return float(total)
        return None


def _root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.sqrt(values.clip(0))


def test_a_thousand_laws(seed: int) -> None:
    """No NaN, nothing outside [0, 1], and what the references say."""
    began = time.monotonic()
    worst = {"mpmath": (0.0, 0), "Fourier": (0.0, 0)}
    counts = dict.fromkeys((*worst, "drawn"), 0)
    far, ratio, between = [], 0.0, 0
    for number in range(CASES):
        draw = np.random.default_rng((seed, number))  # noqa: TID251
        case = Case.drawn(int(draw.integers(2**60)))
        rho = propagation(case.form, case.process).rho
        assert rho.isfinite().all() and rho.min() >= 0 and rho.max() <= 1, (number, rho)
        for position in draw.choice(case.process.tokens, POSITIONS).tolist():
            law, found = Law.of(case, position), rho[position].item()
            head = len(law.query)
            mean, slack = law.averaged(1_000_000 if head <= 4 else 100_000, draw)
            counts["drawn"] += 1
            between += 0.01 < found < 0.99
            ratio = max(ratio, abs(found - mean) / slack)
            if abs(found - mean) > slack:
                far.append((number, position, "drawn", found, mean, slack))
            exact = {"mpmath": law.integrated() if head == 1 and number % 2 else None,
                     "Fourier": law.transformed()}  # fmt: skip
            for name, value in exact.items():
                if value is not None:
                    counts[name] += 1
                    worst[name] = max(worst[name], (abs(found - value), number))
    row = {"cases": CASES, "references": counts, "between .01 and .99": between,
           "worst error": worst, "largest deviation of a drawn one over its bound": round(ratio, 2),
           "seconds": round(time.monotonic() - began)}  # fmt: skip
    sys.stderr.write(f"\n  {json.dumps(row)}\n")
    assert not far, far
    assert max(error for error, _ in worst.values()) < 1e-8, worst
