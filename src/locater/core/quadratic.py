"""The law of a Gaussian quadratic form, inverted numerically to near machine precision.

Every score of the theory is Y = constant + Σ_k (weight_k z_k² + linear_k z_k) with independent
standard normal z: a weighted sum of (non-central) chi-squares.  Its moment generating function is
elementary, and a tail is one contour integral of it,

    P(Y > x) = (1/2πi) ∫ exp(K(s) − x s) ds/s,    Re s > 0,

taken along a hyperbola through the saddle of the integrand (the pole 1/s included, which keeps the
two apart).  Along it the integrand dies exponentially for every rank, down to a single weight, and
the trapezoidal rule converges exponentially.  Tails come out with a relative, not an absolute,
accuracy, because the integrand at the saddle is already as small as the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_BLOCK = 800_000
"""Numbers in flight at once: nodes × rows × weights."""
_SLOPE = 0.5
"""Tangent of the angle at which the contour leaves the vertical; below 1, so that a Gaussian
factor exp(c² s²/2) still decays along it."""
_NODES = 16
"""Of the coarsest trapezoidal rule."""
_FALLEN = -38.0
"""Logarithm of what is rounding error next to the integrand at the saddle."""
_FAR, _CLIMB = 6.0, 3.0
"""A vertical contour may be this long before a bent one is tried, which may climb by e^3."""


@dataclass(frozen=True, eq=False)
class QuadraticLaw:
    """Y = constant + Σ_k (weight_k z_k² + linear_k z_k), for rows of weights.

    >>> law = QuadraticLaw(torch.zeros(1).double(), torch.tensor([[0.5, -0.5]]).double())
    >>> law.mean().item(), law.variance().item()
    (0.0, 1.0)
    >>> law.between(-1.0, 1.0)
    tensor([0.7910], dtype=torch.float64)
    """

    constant: Float[Tensor, " rows"]
    weights: Float[Tensor, "rows weights"]
    linear: Float[Tensor, "rows weights"] | None = None

    def mean(self) -> Float[Tensor, " rows"]:
        """E Y."""
        return self.constant + self.weights.sum(-1)

    def variance(self) -> Float[Tensor, " rows"]:
        """Var Y."""
        variance = 2 * self.weights.square().sum(-1)
        return variance if self.linear is None else variance + self.linear.square().sum(-1)

    def between(self, low: float, high: float) -> Float[Tensor, " rows"]:
        """P(low ≤ Y ≤ high), from the two tails that do not cancel each other.

        With the mean inside these are P(Y > high) and P(Y < low), taken from 1; with the mean
        above, P(Y < high) − P(Y < low); with the mean below, P(Y > low) − P(Y > high).
        """
        mean = self.mean()
        above, below = mean > high, mean < low
        bottom, top = torch.full_like(mean, low), torch.full_like(mean, high)
        outer, inner = torch.where(below, bottom, top), torch.where(below, top, bottom)
        twice = self._rows(torch.arange(len(mean), device=mean.device).repeat(2))
        both = twice._relative(torch.cat((outer, inner)), down=torch.cat((above, ~below)))
        # next to 1, a tail below e⁻⁴⁴ is nothing
        floor = torch.where(above | below, -700.0, -44.0).to(mean).repeat(2)
        first, second = _positive(both, floor).chunk(2)
        result = torch.where(above | below, first, 1 - first) - second
        certain = torch.where(above | below, 0.0, 1.0).to(mean)
        return torch.where(self.is_random, result.clamp(0, 1), certain)

    def _relative(
        self, level: Float[Tensor, " rows"], *, down: Bool[Tensor, " rows"]
    ) -> QuadraticLaw:
        """The law of Y − level, or of level − Y where it goes down."""
        sign = torch.where(down, -1.0, 1.0).to(level)
        return QuadraticLaw(
            sign * (self.constant - level), sign[:, None] * self.weights, self.linear
        )

    @property
    def is_random(self) -> Bool[Tensor, " rows"]:
        """Whether Y varies at all; its variance may be too small a number to say so."""
        moves = (self.weights != 0).any(-1)
        return moves if self.linear is None else moves | (self.linear != 0).any(-1)

    def unit(self) -> QuadraticLaw:
        """Y times a power of 2 that makes its largest coefficient about 1: the same sign as Y.

        Weights that are rounding error next to it are zero: one of the other sign would open a tail
        that no number can follow.
        """
        size = self.weights.abs().amax(-1)
        size = size if self.linear is None else torch.maximum(size, self.linear.abs().amax(-1))
        power = -torch.where(self.is_random, torch.frexp(size).exponent, 0)
        weights = torch.ldexp(self.weights, power[:, None])
        linear = None if self.linear is None else torch.ldexp(self.linear, power[:, None])
        constant = torch.ldexp(self.constant, power).clamp(-1e300, 1e300)
        return QuadraticLaw(constant, torch.where(weights.abs() > 1e-15, weights, 0.0), linear)

    def saddlepoint_between(self, low: float, high: float) -> Float[Tensor, " rows"]:
        """Approximate P(low ≤ Y ≤ high) after Lugannani and Rice: a Newton solve, no integral."""
        chance = (self._saddlepoint_tail(low) - self._saddlepoint_tail(high)).clamp(0, 1)
        inside = (self.constant >= low) & (self.constant <= high)
        return torch.where(self.is_random, chance, inside.to(chance))

    def _rows(self, rows: Tensor | slice) -> QuadraticLaw:
        linear = None if self.linear is None else self.linear[rows]
        return QuadraticLaw(self.constant[rows], self.weights[rows], linear)

    def _saddlepoint_tail(self, level: float) -> Float[Tensor, " rows"]:
        """P(Y > level) by Lugannani and Rice, with its limit at the mean."""
        mean = self.mean()
        flipped = mean > level  # work on the side of the mean where the saddle is positive
        law = self._relative(torch.full_like(mean, level), down=flipped).unit()
        variance = law.variance()
        saddle = _saddle(law, pole=False)
        value, (_, curvature) = law._value(saddle), law._slopes(saddle)
        signed = (-2 * value).clamp_min(0).sqrt()
        scaled = saddle * curvature.sqrt()
        normal = torch.distributions.Normal(0.0, 1.0)
        tail = 1 - normal.cdf(signed)
        density = torch.exp(-signed.square() / 2) / math.sqrt(2 * math.pi)
        third = 8 * law.weights.pow(3).sum(-1)
        if law.linear is not None:
            third = third + 6 * (law.weights * law.linear.square()).sum(-1)
        at_mean = -third / (6 * variance.clamp_min(1e-300) ** 1.5)
        small = signed < 1e-3
        correction = torch.where(
            small, at_mean, 1 / scaled.clamp_min(1e-300) - 1 / signed.clamp_min(1e-300)
        )
        tail = (tail + density * correction).nan_to_num(0.0).clamp(0, 1)
        tail = torch.where(variance == 0, 0.0, tail)
        return torch.where(flipped, 1 - tail, tail)

    def _value(self, point: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """K at real points."""
        gap = 1 - 2 * self.weights * point[:, None]
        value = self.constant * point - gap.log().sum(-1) / 2
        if self.linear is None:
            return value
        return value + point.square() * (self.linear.square() / gap).sum(-1) / 2

    def _slopes(
        self, point: Float[Tensor, " rows"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """K′ and K″ at real points."""
        inverse = (1 - 2 * self.weights * point[:, None]).reciprocal_()
        tilted = self.weights * inverse
        slope = self.constant + tilted.sum(-1)
        curvature = 2 * tilted.square().sum(-1)
        if self.linear is not None:
            square = self.linear.square()
            reach = point[:, None] * inverse
            slope = slope + (square * reach * (1 + self.weights * reach)).sum(-1)
            curvature = curvature + (square * inverse.pow(3)).sum(-1)
        return slope, curvature


@dataclass(frozen=True, eq=False)
class QuadraticFamily:
    """Laws Y = constant + size · Σ_k weight_k(r) z_k² of one parameter r, for stacks of heads.

    The weights are known at Chebyshev nodes of r.  The characteristic function of the sum is
    exp of a function that is smooth in r (the weights themselves may cross), so its logarithm is
    taken at the nodes, along one grid of frequencies, and interpolated to every position.  Then

        P(a ≤ X ≤ b) = (1/π) ∫₀^∞ Re[φ_X(t) (e^{−iat} − e^{−ibt})/(it)] dt

    is a sum: the integrand is entire in t, so that the trapezoidal rule's error is the probability
    that X lies a whole period away.
    """

    low: float
    high: float
    weights: Float[Tensor, "heads nodes weights"]

    @staticmethod
    def nodes(low: float, high: float, count: int) -> Float[Tensor, " nodes"]:
        """Chebyshev's points between two values of r; one point where these are equal."""
        angle = (torch.arange(count if low < high else 1, dtype=torch.float64) + 0.5) * math.pi
        return (low + high) / 2 - (high - low) / 2 * (angle / len(angle)).cos()

    def between_0_and_1(
        self,
        constant: float,
        size: Float[Tensor, " positions"],
        ratio: Float[Tensor, " positions"],
        tolerance: float,
    ) -> Float[Tensor, "heads positions"]:
        """P(0 ≤ Y ≤ 1) to about `tolerance`, absolutely; NaN for heads that need another way."""
        rho = size.new_full((len(self.weights), len(size)), math.nan)
        reach, end = self._reach(tolerance)
        frequencies = (reach * end / math.pi).ceil()
        for head in (frequencies <= _FREQUENCIES).nonzero()[:, 0]:
            most, step = reach[head], math.pi / reach[head]  # the period is twice the reach
            low, high = ((edge - constant) / size for edge in (0.0, 1.0))
            at = step * torch.arange(1, int(frequencies[head]) + 1).to(size)
            log_modulus, phase = self._interpolated(head, at, ratio, tolerance)
            inner = (phase - at * low.clamp(-most, most)[:, None]).sin_()
            inner -= (phase - at * high.clamp(-most, most)[:, None]).sin_()
            total = (log_modulus.exp_() * inner / at).sum(-1)
            width = high.clamp(-most, most) - low.clamp(-most, most)
            rho[head] = step / math.pi * (total + width / 2)
        return rho.clamp(0, 1)

    def _reach(self, tolerance: float) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
        """Beyond which |Σ weight z²| has a chance below `tolerance`, and where φ has died."""
        largest = self.weights.abs().amax(-1)
        least = -math.log(tolerance)
        tail = 2 * least * largest  # Bernstein's bound for a sum of squares
        variance = 2 * self.weights.square().sum(-1)
        reach = tail + (tail.square() + 2 * least * variance).sqrt() + self.weights.sum(-1).abs()
        short = torch.zeros_like(reach[:, 0])
        long = 1e3 / largest.amin(-1).clamp_min(1e-300)
        for _ in range(30):
            middle = (short + long) / 2
            turned = 2 * self.weights * middle[:, None, None]
            small = (turned.square().log1p_().sum(-1) / 4).amin(-1) > least
            short, long = torch.where(small, short, middle), torch.where(small, middle, long)
        return reach.amax(-1), long

    def _interpolated(
        self,
        head: Tensor,
        at: Float[Tensor, " frequencies"],
        ratio: Float[Tensor, " positions"],
        tolerance: float,
    ) -> tuple[Float[Tensor, "positions frequencies"], Float[Tensor, "positions frequencies"]]:
        """log |φ| and the phase of φ at every position; NaN where the nodes are too few."""
        turned = 2 * at[:, None, None] * self.weights[head]  # frequencies nodes weights
        phase = turned.atan().sum(-1) / 2
        log_modulus = -turned.square_().log1p_().sum(-1) / 4
        count = phase.shape[-1]
        order = torch.arange(count).to(at)
        to_coefficients = (order[:, None] * (math.pi - (order + 0.5) * math.pi / count)).cos()
        to_coefficients *= (1 + order.clamp(max=1))[:, None] / count
        if count > 1:  # as much as the last coefficients is what the next ones may leave out
            last = (to_coefficients[-2:] @ torch.stack((log_modulus, phase)).mT).abs().amax((0, 1))
            left_out = (last * log_modulus.amax(-1).exp() / at).sum() * at[0]
            if left_out > tolerance:
                phase = torch.full_like(phase, math.nan)
        span = (self.high - self.low) or 1.0
        place = ((2 * ratio - self.low - self.high) / span).clamp(-1, 1).acos()
        basis = (place[:, None] * order).cos() @ to_coefficients
        return basis @ log_modulus.mT, basis @ phase.mT


_FREQUENCIES = 1024
"""At most so many are summed; otherwise a contour through the saddle is shorter."""


def _saddle(law: QuadraticLaw, *, pole: bool) -> Float[Tensor, " rows"]:
    """Minimize K(s) − [log s] over 0 < s < 1/(2 max weight): convex, by safeguarded Newton."""
    top = law.weights.amax(-1)
    limit = torch.where(top > 0, 0.5 / top.clamp_min(1e-300), math.inf)
    low = torch.zeros_like(limit)
    high = limit
    point = torch.minimum(limit / 2, 1 / law.variance().clamp_min(1e-300).sqrt())
    for _ in range(100):
        slope, curvature = law._slopes(point)
        if pole:
            slope, curvature = slope - 1 / point, curvature + 1 / point.square()
        if bool((slope.abs() <= (0.02 if pole else 1e-12) * curvature.sqrt()).all()):
            break
        low = torch.where(slope < 0, point, low)
        high = torch.where(slope > 0, point, high)
        newton = point - slope / curvature
        middle = torch.where(high.isinf(), 4 * point, (low + high) / 2)
        inside = (newton > low) & (newton < high) & newton.isfinite()
        point = torch.where(inside, newton, middle)
    return point


def _positive(law: QuadraticLaw, floor: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """P(Y > 0), block by block, or 0 where it is certainly below e^floor."""
    law, (count, width) = law.unit(), law.weights.shape
    size = max(1, _BLOCK // (_NODES * max(width, 1)))
    result = torch.zeros_like(law.constant)
    for start in range(0, count, size):
        block = law._rows(slice(start, start + size))
        saddle = _saddle(block, pole=True)
        value = block._value(saddle) - saddle.log()
        _, curvature = block._slopes(saddle)
        spread = (curvature + 1 / saddle.square()).rsqrt()
        # weights that cannot reach the level have no saddle: the minimum runs off to −∞, or into
        # the end of the strip where K is infinite
        is_alive = (value > floor[start : start + size]) & value.isfinite() & block.is_random
        alive = (is_alive & spread.isfinite() & (spread > 0)).nonzero()[:, 0]
        if len(alive):
            contour = _Contour(block._rows(alive), saddle[alive], spread[alive], value[alive])
            result[start + alive] = _integrate(contour)
    return result


class _Contour:
    """exp(K(s) − log s − value) ds along s = saddle + width (bend (cosh v − 1) + i sinh v).

    Factors 1 − 2ws are multiplied in pairs, so that one arc tangent and an eighth of a logarithm
    serve two weights: these calls are what the whole inversion costs.
    """

    def __init__(
        self,
        law: QuadraticLaw,
        saddle: Float[Tensor, " rows"],
        width: Float[Tensor, " rows"],
        value: Float[Tensor, " rows"],
    ) -> None:
        self.linear = None if law.linear is None else (law.weights, law.linear.square() / 2)
        weights = torch.nn.functional.pad(law.weights, (0, -law.weights.shape[-1] % 16))
        weights = weights.sort(-1).values
        half = weights.shape[-1] // 2
        first, second = weights[:, :half], weights.flip(-1)[:, :half]
        self.sum, self.product = 2 * (first + second), 4 * first * second
        # both phases of a pair of equal signs point the same way and may add up to more than π
        turn = 2 * math.pi * torch.where(self.product > 0, torch.sign(first), 0.0)
        self.turn = turn if bool(turn.any()) else None
        self.constant, self.saddle, self.width, self.value = law.constant, saddle, width, value
        far = law.constant
        if law.linear is not None:
            # completed squares: far out, K(s) grows like this multiple of s; a term without a
            # weight to speak of is Gaussian and decays on any contour of ours
            size = law.weights.abs()
            counts = size > 1e-6 * size.amax(-1, keepdim=True)
            shift = law.linear.square() / (4 * torch.where(counts, law.weights, math.inf))
            far = far - shift.sum(-1)
        self.bend = -torch.sign(far) * _SLOPE * width
        self.end = self._end(torch.arange(len(width), device=width.device))

    def _point(self, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        bend, width = self.bend[rows, None], self.width[rows, None]
        sine, cosine = torch.sinh(at), torch.cosh(at)
        point = torch.complex(self.saddle[rows, None] + bend * (cosine - 1), width * sine)
        step = torch.complex(bend * sine, width * cosine)
        square = point.square()
        total, product = self.sum[rows, None], self.product[rows, None]
        real = (product * square.real[..., None]).addcmul_(total, point.real[..., None], value=-1)
        imag = (product * square.imag[..., None]).addcmul_(total, point.imag[..., None], value=-1)
        real += 1
        return point, step, real, imag

    def _exponent(
        self, rows: Tensor, point: Tensor, real: Tensor, imag: Tensor
    ) -> tuple[Tensor, Tensor]:
        size = real.square().addcmul_(imag, imag).unflatten(-1, (-1, 8)).prod(-1)
        rest = self.constant[rows, None] * point - point.log()
        if self.linear is not None:
            weights, square = self.linear[0][rows, None], self.linear[1][rows, None]
            ratio = square / (1 - 2 * weights * point[..., None])
            rest = rest + point.square() * ratio.sum(-1)
        return rest.real - size.log().sum(-1) / 4 - self.value[rows, None], rest.imag

    def _log_size(self, rows: Tensor, at: Float[Tensor, "rows nodes"]) -> Tensor:
        """Logarithm of the integrand's modulus, relative to its value at the saddle."""
        point, step, real, imag = self._point(rows, at)
        size, _ = self._exponent(rows, point, real, imag)
        return size + (step.abs() / self.width[rows, None]).log()

    def _end(self, rows: Tensor) -> Float[Tensor, " rows"]:
        """Where the integrand has fallen to rounding error, by bisection.

        With linear terms a bent contour may climb before it falls; such rows are straightened.  The
        modulus falls along a vertical line for certain, but for few weights slowly.
        """
        if self.linear is not None:
            bent, self.bend = self.bend, torch.zeros_like(self.bend)
            end = self._bisect(rows)
            slow = rows[end > _FAR]
            if len(slow):
                self.bend[slow] = bent[slow]
                grid = torch.linspace(0.25, 20, 80, dtype=end.dtype, device=end.device)
                size = self._log_size(slow, grid.expand(len(slow), -1))
                is_over = (~(size > _FALLEN)).cumsum(-1) > 0  # what comes later does not count
                climbs = size.masked_fill(is_over, -math.inf).amax(-1) > _CLIMB
                good = is_over[:, -1] & ~climbs
                self.bend[slow[~good]] = 0.0
                end[slow[good]] = grid[is_over[good].int().argmax(-1)]
            return end
        return self._bisect(rows)

    def _bisect(self, rows: Tensor) -> Float[Tensor, " rows"]:
        short = torch.zeros_like(self.saddle[rows])
        long = torch.full_like(short, 80.0)
        for _ in range(9):
            middle = (short + long) / 2
            small = ~(self._log_size(rows, middle[:, None])[:, 0] > _FALLEN)
            short, long = torch.where(small, short, middle), torch.where(small, middle, long)
        return long

    def total(self, rows: Tensor, at: Float[Tensor, "rows nodes"]) -> Float[Tensor, " rows"]:
        """Imaginary part of the integrand, summed over nodes."""
        point, step, real, imag = self._point(rows, at)
        size, angle = self._exponent(rows, point, real, imag)
        phase = torch.atan2(imag, real)
        if self.turn is not None:
            turn = self.turn[rows, None]
            phase = torch.where(phase * turn > 0, phase - turn, phase)
        angle = angle - phase.sum(-1) / 2 + step.angle()
        return (size.exp() * step.abs() * angle.sin()).nan_to_num(0.0).sum(-1)


def _integrate(contour: _Contour) -> Float[Tensor, " rows"]:
    """(1/π) ∫ Im(integrand) over v ≥ 0: the trapezoidal rule, its step halved until it settles."""
    rows = torch.arange(len(contour.saddle), device=contour.saddle.device)
    step = contour.end / _NODES
    total = contour.total(rows, torch.zeros_like(step)[:, None]) / 2
    result = torch.full_like(step, math.nan)
    nodes, at = _NODES, torch.arange(1, _NODES + 1, device=step.device, dtype=step.dtype)
    while len(rows):
        for some in at.split(32):
            total[rows] += contour.total(rows, step[rows, None] * some)
        estimate = total[rows] * step[rows]
        # the error about squares as the step halves, but two coarse values may agree by chance
        settled = (estimate - result[rows]).abs() <= 1e-10 * estimate.abs()
        result[rows] = estimate
        rows = rows[~settled]
        if nodes > 50_000:
            break
        nodes, step = 2 * nodes, step / 2
        at = torch.arange(1, nodes, 2, device=step.device, dtype=step.dtype)
    return result * contour.value.exp() / math.pi
