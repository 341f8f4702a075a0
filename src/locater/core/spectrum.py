"""The eigenspectrum of W_QK = W_Qᵀ W_K and what follows from it, from two thin factors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from locater.errors import InputError
from locater.notebook import Shown


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum(Shown):
    """What the eigenvalues of W = W_QK Σ add up to; computed when asked for.

    All of it is the spectrum of S = Σ^½ W_QK Σ^½, which has the eigenvalues of W and is symmetric
    when W_QK is; and all of it follows from three head × head Gram matrices.

    >>> from locater import QKForm
    >>> form = QKForm(torch.eye(4), torch.eye(4), temperature=2.0)
    >>> spectrum = form.spectrum()
    >>> float(spectrum.trace), float(spectrum.r), float(spectrum.dispersion)
    (4.0, 2.0, 0.0)
    """

    query: Float[Tensor, "*heads head model"]
    key: Float[Tensor, "*groups head model"]
    """One for each head, or for each group of neighboring heads that share it."""
    temperature: float
    covariance: Float[Tensor, "model model"] | None = None
    is_symmetric: bool = False

    _picture = ("line", "head:O", "trace:Q", "head:N")

    def _line(self) -> str:
        return f"{self.trace.numel()} heads of rank {self.rank}"

    def _table(self) -> list[dict[str, Any]]:
        rows = zip(self.trace.flatten(), self.frobenius_squared.flatten(), strict=True)
        return [
            {"head": head, "trace": trace.item(), "frobenius_squared": square.item()}
            for head, (trace, square) in enumerate(rows)
        ]

    @property
    def rank(self) -> int:
        """The largest rank that W_QK can have."""
        return min(self.query.shape[-2:])

    @property
    def share(self) -> int:
        """How many heads have the same key."""
        return self.query.shape[0] // self.key.shape[0] if self.key.ndim > 2 else 1

    def _repeated(self, part: Tensor) -> Tensor:
        return part if self.share == 1 else part.repeat_interleave(self.share, 0)

    @cached_property
    def colored(self) -> tuple[Float[Tensor, "*heads head model"], Float[Tensor, ...]]:
        """W_Q Σ and W_K Σ."""
        if self.covariance is None:
            return self.query, self.key
        return self.query @ self.covariance, self.key @ self.covariance

    @cached_property
    def query_gram(self) -> Float[Tensor, "*heads head head"]:
        """W_Q Σ W_Qᵀ."""
        return self.colored[0] @ self.query.mT

    @cached_property
    def key_gram(self) -> Float[Tensor, "*heads head head"]:
        """W_K Σ W_Kᵀ."""
        return self._repeated(self.colored[1] @ self.key.mT)

    @cached_property
    def cross_gram(self) -> Float[Tensor, "*heads head head"]:
        """W_K Σ W_Qᵀ; the heads of a group lie side by side, one product serves them all."""
        if self.share == 1:
            return (self.query @ self.colored[1].mT).mT
        group = self.query.reshape(len(self.key), -1, self.key.shape[-1]) @ self.colored[1].mT
        return group.unflatten(1, (self.share, -1)).flatten(0, 1).mT

    def in_double(self) -> Spectrum:
        """The same, with the sums over the dimensions of tokens in float64 from here on."""
        wide = {
            name: getattr(self, name).double() for name in ("query_gram", "key_gram", "cross_gram")
        }
        made = replace(self)
        made.__dict__.update(wide)
        return made

    @cached_property
    def trace(self) -> Float[Tensor, "*heads"]:
        """tr(W), row by row: one long dot product loses digits in float32."""
        if "cross_gram" in self.__dict__:
            return self.cross_gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        if self.share == 1:
            return torch.linalg.vecdot(self.colored[0], self.key).sum(-1)
        group = self.colored[0].unflatten(0, (-1, self.share))
        return torch.linalg.vecdot(group, self.key[:, None]).sum(-1).flatten()

    @cached_property
    def trace_of_square(self) -> Float[Tensor, "*heads"]:
        """tr(W²)."""
        return (self.cross_gram * self.cross_gram.mT).sum((-2, -1))

    @cached_property
    def frobenius_squared(self) -> Float[Tensor, "*heads"]:
        """‖S‖²_F, at least |tr(W²)|, and equal to it where W_QK is symmetric."""
        return (self.query_gram * self.key_gram).sum((-2, -1))

    @cached_property
    def eigenvalues(self) -> Complex[Tensor, "*heads rank"]:
        """The eigenvalues that can differ from zero, from a matrix of the smaller side."""
        head, model = self.query.shape[-2:]
        small = self.cross_gram
        if model < head:
            small = self.query.double().mT @ self._repeated(self.colored[1]).double()
        return torch.linalg.eigvals(small)

    @cached_property
    def singular_values(self) -> Float[Tensor, "*heads rank"]:
        """The singular values of S, largest first; small ones to about 1e-8 of the largest."""
        root = gram_root(self.query_gram, 0.0)
        squares = torch.linalg.eigvalsh(root.mT @ self.key_gram @ root).flip(-1)
        return squares.clamp_min(0).sqrt()[..., : self.rank]

    @property
    def spectral_norm(self) -> Float[Tensor, "*heads"]:
        """‖S‖₂."""
        return self.singular_values[..., 0]

    @property
    def stable_rank(self) -> Float[Tensor, "*heads"]:
        """‖S‖²_F / ‖S‖²₂; NaN for a form that is zero."""
        return self.frobenius_squared / self.spectral_norm.square()

    @property
    def mean(self) -> Float[Tensor, "*heads"]:
        """The mean of the `rank` eigenvalues that can differ from zero."""
        return self.trace / self.rank

    @property
    def variance(self) -> Float[Tensor, "*heads"]:
        """Population variance of the eigenvalues, E|w − E w|².

        Paper: Eq. 8, over the `rank` eigenvalues that can differ from zero.  Erratum E10: for a
        complex spectrum (tr W²)/r − (tr W)²/r² is not a variance and may be negative.
        """
        if self.is_symmetric:
            return self.trace_of_square / self.rank - self.mean.square()
        return (self.eigenvalues - self.mean[..., None]).abs().square().mean(-1)

    @property
    def dispersion(self) -> Float[Tensor, "*heads"]:
        """rank ‖S‖²_F − tr(W)²: zero only for a multiple of a projector."""
        return self.rank * self.frobenius_squared - self.trace.square()

    @property
    def nonnormality(self) -> Float[Tensor, "*heads"]:
        """‖S‖²_F − Σ|w|², Henrici's gap: zero when S has orthogonal eigenvectors."""
        return self.frobenius_squared - self.eigenvalues.abs().square().sum(-1)

    @property
    def asymmetry(self) -> Float[Tensor, "*heads"]:
        """‖(S − Sᵀ)/2‖²_F / ‖S‖²_F: 0 for a symmetric form, 1 for an antisymmetric one."""
        return (1 - self.trace_of_square / self.frobenius_squared) / 2

    @property
    def xi(self) -> Float[Tensor, "*heads"]:
        """ξ = tr(W)/‖S‖_F, within ±√rank: how far the spectrum concentrates off zero.

        Paper: Eq. 6, for symmetric W_QK.  Erratum E10: with √tr(W²) in place of the norm, ξ of an
        asymmetric form is unbounded or imaginary; that one is `xi_as_printed`.
        """
        return self.trace / self.frobenius_squared.sqrt()

    @property
    def eta(self) -> Float[Tensor, "*heads"]:
        """η = ‖S‖_F/λ, the scale of the logits.  Paper: Eq. 6 (see `xi`)."""
        return self.frobenius_squared.sqrt() / self.temperature

    @property
    def xi_as_printed(self) -> Float[Tensor, "*heads"]:
        """tr(W)/√tr(W²), NaN where tr(W²) is negative."""
        return self.trace / self.trace_of_square.sqrt()

    @property
    def eta_as_printed(self) -> Float[Tensor, "*heads"]:
        """√tr(W²)/λ, NaN where tr(W²) is negative."""
        return self.trace_of_square.sqrt() / self.temperature

    @property
    def r(self) -> Float[Tensor, "*heads"]:
        """r = ξη = tr(W)/λ: attention localizes beyond |r| = 2 (Lemma 2)."""
        return self.trace / self.temperature


def check_covariance(
    covariance: Float[Tensor, "size size"],
    *,
    size: int | None = None,
    what: Literal["covariance", "kernel"] = "covariance",
) -> None:
    """Refuse what is no covariance; a singular one is one."""
    size = size or covariance.shape[-1]
    if covariance.shape != (size, size):
        raise InputError(
            f"{what} is {tuple(covariance.shape)}, expected {size} x {size}.",
            hint=f"a {what} is a square symmetric matrix.",
        )
    if not math.isfinite(largest(covariance)):
        raise InputError(
            f"{what} holds NaN or infinite values.", hint=f"check what the {what} was made from."
        )
    scale = largest(covariance.diagonal())
    # an estimate that was accumulated in float32 is symmetric to about 1e-6
    loose = max(1e-6, size * torch.finfo(covariance.dtype).eps)
    if scale == 0 or largest(covariance - covariance.mT) > loose * scale:
        raise InputError(
            f"{what} is {'zero' if scale == 0 else 'not symmetric'}.",
            hint=f"a {what} C is symmetric with a positive diagonal; try (C + C.mT) / 2.",
        )
    wide = (covariance.double() + covariance.mT.double()) / 2
    lifted = wide.clone()
    lifted.diagonal().add_(loose * scale)
    if not int(torch.linalg.cholesky_ex(lifted).info):
        return
    values = torch.linalg.eigvalsh(wide)
    if values[0].item() < -loose * values[-1].abs().item():
        raise InputError(
            f"{what} is not positive definite: its smallest eigenvalue is {values[0].item():.3g}.",
            hint=f"a {what} has no negative eigenvalues; clip them or estimate it from more data.",
        )


def semidefinite_root(gram: Float[Tensor, "*heads size size"]) -> Float[Tensor, "*heads size size"]:
    """A root R with R Rᵀ equal to a positive semidefinite matrix, which may be singular.

    Eigenvalues that are rounding error count as zero: their roots would be 10⁸ times larger.
    """
    values, vectors = torch.linalg.eigh(gram)
    noise = max(1e-13, gram.shape[-1] * torch.finfo(gram.dtype).eps) * values[..., -1:].abs()
    return vectors * torch.where(values > noise, values, 0.0).sqrt()[..., None, :]


def gram_root(
    gram: Float[Tensor, "*heads size size"], least: float = 1e-6
) -> Float[Tensor, "*heads size size"]:
    """Cholesky's root, or `semidefinite_root` where a pivot is not above `least` of the largest."""
    root, failed = torch.linalg.cholesky_ex(gram)
    pivots = root.diagonal(dim1=-2, dim2=-1)
    singular = (failed > 0) | ~(pivots.amin(-1) > least * pivots.amax(-1))
    if bool(singular.any()):
        root[singular] = semidefinite_root(gram[singular])
    return root


def largest(values: Tensor) -> float:
    """The largest |value|, NaN where there is one; without a copy, as `abs` would make."""
    if not values.numel():
        return 0.0
    low, high = (end.item() for end in values.detach().aminmax())
    return max(-low, high) if low == low else low
