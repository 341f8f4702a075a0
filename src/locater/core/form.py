"""A head's query-key form W_QK = W_Qᵀ W_K, kept as two thin factors, and what acts beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from locater.core.spectrum import Spectrum, check_covariance, largest
from locater.errors import ConfigError, InputError, check_choice
from locater.notebook import Shown

Layout = Literal["half", "interleaved"]
Record = TypeVar("Record")


def mapped(record: Record, names: Iterable[str], function: Callable[[str, Tensor], Any]) -> Record:
    """A record with those of its parts of these names changed that it has."""
    parts = {name: getattr(record, name) for name in names}
    made: Any = record
    changed = {name: function(name, part) for name, part in parts.items() if part is not None}
    result: Record = replace(made, **changed)
    return result


@dataclass(frozen=True, eq=False)
class Rotary:
    """Which pairs of dimensions turn, and how fast.

    `half` pairs dimension k with k + n (Llama, GPT-NeoX), `interleaved` pairs 2k with 2k + 1
    (GPT-J); dimensions past 2n stay as they are (partial rotary).

    >>> rotary = Rotary(torch.tensor([torch.pi / 2]))
    >>> (
    ...     rotary.turn(torch.tensor([1.0, 0.0]), rotary.phases(torch.tensor(1))).round(decimals=4)
    ...     + 0.0
    ... )
    tensor([0., 1.])
    """

    frequencies: Float[Tensor, " pairs"]  # radians per token
    layout: Layout = "half"

    def __post_init__(self) -> None:
        check_choice("rotary layout", self.layout, get_args(Layout))
        if not bool(torch.isfinite(self.frequencies).all()):
            raise InputError(
                "rotary frequencies hold NaN or infinite values.",
                hint="they are base ** (-2k / dimensions), in radians per token.",
            )

    @classmethod
    def from_base(
        cls, dimensions: int, *, base: float = 10_000.0, layout: Layout = "half"
    ) -> Rotary:
        """Make the usual geometric frequencies base^(−2k/dimensions).

        >>> Rotary.from_base(4, base=100.0).frequencies
        tensor([1.0000, 0.1000], dtype=torch.float64)
        """
        steps = torch.arange(0, dimensions, 2, dtype=torch.float64)
        return cls(base ** (-steps / dimensions), layout)

    def phases(self, position: Tensor) -> Complex[Tensor, "*positions phases"]:
        """e^{i·position·frequency}; the last entry belongs to the dimensions that never turn."""
        angle = position[..., None] * torch.nn.functional.pad(self.frequencies, (0, 1))
        return torch.polar(torch.ones_like(angle), angle)

    def turn(
        self, vectors: Float[Tensor, "*batch head"], phases: Complex[Tensor, "*turns phases"]
    ) -> Float[Tensor, "*result head"]:
        """Multiply each pair of coordinates by its phase, the others by the last phase."""
        pairs = self.frequencies.shape[0]
        turned, rest = vectors[..., : 2 * pairs], vectors[..., 2 * pairs :]
        if self.layout == "half":
            first, second = turned[..., :pairs], turned[..., pairs:]
        else:
            first, second = turned[..., 0::2], turned[..., 1::2]
        cos, sin = phases[..., :-1].real, phases[..., :-1].imag
        first, second = first * cos - second * sin, first * sin + second * cos
        rest = rest * phases[..., -1:].real
        joined = (
            torch.cat((first, second), -1)
            if self.layout == "half"
            else torch.stack((first, second), -1).flatten(-2)
        )
        return torch.cat((joined, rest), -1)


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A norm between projection and product (qk-norm, MLA), taken at its root mean square.

    The model divides by ‖y‖, y = rows·x + bias; for Gaussian tokens ‖y‖ concentrates, so a form
    divides by its root mean square instead and W_QK exists again.  `deviation` says how far ‖y‖
    strays from it, which is the size of what is left out.

    >>> norm = HeadNorm(torch.eye(4)[None], torch.tensor([2.0]))
    >>> norm.mean_square(), norm.deviation()
    (tensor([4.], dtype=torch.float64), tensor([0.3536], dtype=torch.float64))
    """

    rows: Float[Tensor, "*heads size model"]  # of each head, or one for all heads
    size: Float[Tensor, "*heads"]
    """The root mean square that stands in the form's factor."""
    bias: Float[Tensor, "*heads size"] | None = None
    shift: Float[Tensor, "*heads head"] | None = None
    """The part of the form's bias that is added after the norm."""
    eps: float = 0.0
    """What the model adds to the mean square of y."""
    start: int = 0
    stop: int | None = None
    """The dimensions of the head that the norm scales."""

    def mean_square(
        self,
        covariance: Float[Tensor, "model model"] | None = None,
        mean: Float[Tensor, " model"] | None = None,
    ) -> Float[Tensor, "*heads"]:
        """E‖y‖² for tokens of this covariance (Σ = I by default) and mean."""
        one = self.rows.new_ones(1, dtype=torch.float64)
        means = None if mean is None else mean[None]
        return self.mean_squares(one, covariance, means)[..., 0]

    def mean_squares(
        self,
        variances: Float[Tensor, " tokens"],
        covariance: Float[Tensor, "model model"] | None = None,
        means: Float[Tensor, "tokens model"] | None = None,
    ) -> Float[Tensor, "*heads tokens"]:
        """E‖y_t‖² for tokens of covariance variance_t · Σ around their means.

        ‖W m + b‖² has the uncentred second moment and twice b·W m: both matter as much as tr G.
        """
        rows = self.rows.double()
        trace = ((rows if covariance is None else rows @ covariance.to(rows)) * rows).sum((-2, -1))
        moved = rows.new_zeros(1, 1) if means is None else means.to(rows) @ rows.mT
        if self.bias is not None:
            moved = moved + self.bias.double()[..., None, :]
        own = trace[..., None] * variances.to(rows) + self.eps * self.rows.shape[-2]
        return own + moved.square().sum(-1)

    def deviation(
        self,
        covariance: Float[Tensor, "model model"] | None = None,
        mean: Float[Tensor, " model"] | None = None,
    ) -> Float[Tensor, "*heads"]:
        """How far ‖y‖ strays: half of √(2 tr G² + 4 mᵀGm)/E‖y‖², for Gaussian tokens."""
        rows, mu = self.rows.double(), self._mean(mean)
        gram = (rows if covariance is None else rows @ covariance.to(rows)) @ rows.mT
        along = (gram @ mu[..., None])[..., 0]
        variance = 2 * gram.square().sum((-2, -1)) + 4 * (mu * along).sum(-1)
        return variance.sqrt() / (2 * self.mean_square(covariance, mean))

    def _mean(self, mean: Tensor | None) -> Tensor:
        rows = self.rows.double()
        moved = rows.new_zeros(rows.shape[:-1]) if mean is None else rows @ mean.to(rows)
        return moved if self.bias is None else moved + self.bias.double()

    def factor(self, tokens: Float[Tensor, "*batch model"]) -> Float[Tensor, "*batch heads"]:
        """What the form's queries or keys of these tokens are to be multiplied with, exactly."""
        rows = self.rows.flatten(0, -3) if self.rows.ndim > 2 else self.rows[None]
        moved = torch.einsum("...m,hsm->...hs", tokens.double(), rows.double())
        if self.bias is not None:
            moved = moved + self.bias.double().reshape(rows.shape[:2])
        square = moved.square().sum(-1) + self.eps * rows.shape[-2]
        return self.size.double().reshape(-1) / square.sqrt()

    def scaled(self, part: Tensor, ratio: Float[Tensor, "*heads"], axis: int = -1) -> Tensor:
        """A part of the heads with its normalized dimensions, along an axis, scaled."""
        inside = torch.zeros(part.shape[axis], dtype=torch.bool, device=part.device)
        inside[self.start : self.stop] = True
        gain = ratio.to(part).reshape(*ratio.shape, *[1] * (part.ndim - ratio.ndim))
        inside = inside.reshape(-1, *[1] * (-1 - axis))
        return torch.where(inside, part * gain, part)

    def apply(
        self, vectors: Float[Tensor, "*batch head"], sizes: Float[Tensor, "*some"]
    ) -> Float[Tensor, "*batch head"]:
        """The form's queries or keys multiplied by their `factor`, but for what comes after."""
        if self.shift is None:
            return self.scaled(vectors, sizes)
        axes = vectors.ndim - self.shift.ndim
        shift = self.shift.to(vectors).unflatten(-1, (*[1] * axes, -1)) if axes else self.shift
        return self.scaled(vectors - shift, sizes) + shift

    def _by_head(self) -> tuple[str, ...]:
        """What belongs to heads, and is not shared by all of them."""
        return ("shift",) if self.rows.shape[0] == 1 else _NORM

    def taken(self, heads: tuple[Any, ...]) -> HeadNorm:
        """Of some heads."""
        return mapped(self, self._by_head(), lambda _, part: part[(*heads, ...)])

    def repeated(self, share: int) -> HeadNorm:
        """For heads that share a key."""
        return mapped(self, self._by_head(), lambda _, part: part.repeat_interleave(share, 0))

    def to(self, device: torch.device | None) -> HeadNorm:
        """On another device."""
        return mapped(self, _NORM, lambda _, part: part.to(device))


_NORM = ("rows", "size", "bias", "shift")


@dataclass(frozen=True, eq=False)
class Relative:
    """What a logit gains for where its key stands from its query: bias(Δ) + q·key(Δ)/λ.

    Δ counts tokens back to the key; on a `grid` of places, read row by row, it counts rows and
    columns.  Offsets past the end of a table take its last entry.

    >>> relative = Relative(bias=torch.tensor([-1.0, 0.0, 5.0]), ahead=1)
    >>> relative.bias_at(torch.tensor([2]), 3)  # two back, one back, the query's own place
    tensor([[5., 5., 0.]], dtype=torch.float64)
    """

    columns: Float[Tensor, "*heads across head"] | None = None
    rows: Float[Tensor, "*heads down head"] | None = None
    """Vectors that join the key, one for each offset of columns (tokens) and of rows."""
    bias: Float[Tensor, "*heads down across"] | Float[Tensor, "*heads across"] | None = None
    """Numbers that join the logit."""
    ahead: int = 0
    """Entries of `columns` and `bias` that belong to keys after the query."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the places; None: a text of any length."""

    @property
    def places(self) -> int | None:
        """The most tokens that it knows places for."""
        return None if self.grid is None else math.prod(self.grid)

    def _offsets(self, queries: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Rows and columns from each query back to every key, as entries of the tables."""
        if self.places is not None and tokens > self.places:
            raise InputError(
                f"a table of {self.grid} places cannot place {tokens} tokens.",
                hint=f"ask for {self.places} tokens at most.",
            )
        keys = torch.arange(tokens, device=queries.device)
        if self.grid is None:
            back = queries[:, None] - keys
            return torch.zeros_like(back), back + self.ahead
        height, width = self.grid
        first = height * width - tokens  # fewer tokens are the last ones of the picture
        asks, answers = queries[:, None] + first, keys + first
        row, column = asks // width - answers // width, asks % width - answers % width
        return row + height - 1, column + width - 1

    def bias_at(
        self, queries: Int[Tensor, " queries"], tokens: int
    ) -> Float[Tensor, "*heads queries tokens"] | None:
        """What joins the logits of these queries with all tokens."""
        if self.bias is None:
            return None
        row, column = self._offsets(queries, tokens)
        column = column.clamp(0, self.bias.shape[-1] - 1)
        bias = self.bias.double()
        return bias[..., column] if self.grid is None else bias[..., row, column]

    def keys_at(
        self, queries: Int[Tensor, " queries"], tokens: int
    ) -> Float[Tensor, "*heads queries tokens head"] | None:
        """What joins the keys that these queries meet."""
        row, column = self._offsets(queries, tokens)
        parts = [
            table.double()[..., offset.clamp(0, table.shape[-2] - 1), :]
            for table, offset in ((self.rows, row), (self.columns, column))
            if table is not None
        ]
        return sum(parts[1:], parts[0]) if parts else None

    def mapped(self, function: Callable[[str, Tensor], Tensor]) -> Relative:
        """With every table changed, by its name."""
        return mapped(self, ("columns", "rows", "bias"), function)


@dataclass(frozen=True, eq=False, repr=False)
class QKForm(Shown):
    """A stack of heads' W_QK = W_Qᵀ W_K (Section 2), kept as the two factors a checkpoint stores.

    >>> form = QKForm(torch.eye(2, 3), torch.ones(2, 3), temperature=2.0)
    >>> form.trace()
    tensor(2.)
    >>> form.spectrum().r
    tensor(1., dtype=torch.float64)
    """

    query: Float[Tensor, "*heads head model"]  # laid out as nn.Linear.weight, like key
    key: Float[Tensor, "*heads head model"]
    temperature: float  # λ, usually √head
    query_bias: Float[Tensor, "*heads head"] | None = None
    key_bias: Float[Tensor, "*heads head"] | None = None
    """Constant over the keys, so it cancels in the softmax, unless a rotation stands between."""
    rotary: Rotary | None = None
    distance_bias: Float[Tensor, "*heads distances"] | None = None
    """Added to the logit of the key that many tokens before the query (ALiBi, T5)."""
    is_symmetric: bool = False
    """Known to be symmetric: the law of its scores then needs no eigenproblem per position."""
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    """Norms between projection and product; their root mean square is in the factors."""
    relative: Relative | None = None
    """Tables of relative positions (Transformer-XL, Swin, SAM)."""

    _picture = ("line", "head:O", "trace:Q", "head:N")

    def _line(self) -> str:
        size, width = self.query.shape[-2:]
        heads = self.query.shape[:-2].numel()
        return f"{heads} heads of {size} × {width}, λ = {self.temperature:.4g}"

    def _table(self) -> list[dict[str, Any]]:
        return self.spectrum()._table()

    def __post_init__(self) -> None:
        shape, heads = tuple(self.query.shape), tuple(self.query.shape[:-2])
        if self.query.ndim < 2 or self.query.shape != self.key.shape:
            raise InputError(
                f"query is {shape} and key is {tuple(self.key.shape)}.",
                hint="both must be (*heads, head, model); repeat shared key heads (GQA) first.",
            )
        if not self.query.numel():
            raise InputError(
                f"query and key are {shape}: they hold no numbers.",
                hint="a form has at least one head of at least one dimension.",
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                f"temperature must be positive and finite, got {self.temperature}.",
                hint="the usual choice is the square root of the head dimension.",
            )
        for name in ("query_bias", "key_bias"):
            bias = getattr(self, name)
            if bias is not None and bias.shape != shape[:-1]:
                raise InputError(
                    f"{name} is {tuple(bias.shape)}, the factors ask for {shape[:-1]}.",
                    hint="give one bias vector of the head dimension for every head.",
                )
        if self.distance_bias is not None and self.distance_bias.shape[:-1] != heads:
            raise InputError(
                f"distance_bias is {tuple(self.distance_bias.shape)} for heads {heads}.",
                hint="give (*heads, distances): entry k is added to the key k tokens back.",
            )
        if self.rotary is not None and 2 * self.rotary.frequencies.shape[0] > shape[-2]:
            raise InputError(
                f"{self.rotary.frequencies.shape[0]} rotary frequencies turn more than "
                f"{shape[-2]} dimensions.",
                hint="each frequency turns a pair of dimensions of the head.",
            )
        for name, value in self._tensors().items():
            if not value.is_floating_point():
                raise InputError(
                    f"{name} holds {value.dtype}, not floating-point numbers.",
                    hint="give real weights, dequantized: .float(), or .real of complex ones.",
                )
            if not math.isfinite(largest(value)):
                raise InputError(
                    f"{name} holds NaN or infinite values.",
                    hint="the weights diverged or were read wrongly; use an earlier checkpoint.",
                )

    @classmethod
    def from_matrix(cls, matrix: Float[Tensor, "*heads model _"], *, temperature: float) -> QKForm:
        """Take a square W_QK itself, symmetric or not (the joint parametrization of Section 2).

        >>> QKForm.from_matrix(torch.eye(3), temperature=1.0).is_symmetric
        True
        """
        if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
            raise InputError(
                f"matrix is {tuple(matrix.shape)}, not square.",
                hint="W_QK maps tokens to tokens; for thin factors call QKForm(query, key).",
            )
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        return cls(
            identity.expand(matrix.shape),
            matrix,
            temperature,
            is_symmetric=torch.equal(matrix, matrix.mT),
        )

    @classmethod
    def from_eigenvalues(
        cls, values: Float[Tensor, "*heads model"], *, temperature: float
    ) -> QKForm:
        """Take a symmetric W_QK by its eigenvalues; where Σ = I, the basis does not matter.

        >>> QKForm.from_eigenvalues(torch.tensor([1.0, 2.0]), temperature=1.0).trace()
        tensor(3.)
        """
        return cls.from_matrix(torch.diag_embed(values), temperature=temperature)

    @classmethod
    def from_xi_eta(cls, xi: float, eta: float, *, dim: int) -> QKForm:
        """Make the two-point spectrum that has the ξ and η of Eq. 6, with λ = √dim.

        >>> spectrum = QKForm.from_xi_eta(5.0, 0.1, dim=128).spectrum()
        >>> round(spectrum.xi.item(), 9), round(spectrum.eta.item(), 9)
        (5.0, 0.1)
        """
        if dim < 1 or not (abs(xi) <= math.sqrt(dim) and 0 <= eta < math.inf):
            raise ConfigError(
                f"no spectrum of {dim} eigenvalues has xi = {xi:g}, eta = {eta:g}.",
                hint="Eq. 5 asks for |xi| <= sqrt(dim), and eta must not be negative.",
            )
        if dim == 1 and abs(xi) < 1:
            raise ConfigError(
                f"one eigenvalue has xi = 1 or -1, not {xi:g}.", hint="use a larger dim."
            )
        temperature = math.sqrt(dim)
        mean = xi * eta * temperature / dim
        spread = math.sqrt(max(0.0, (eta * temperature) ** 2 / dim - mean**2))
        sign = torch.ones(dim, dtype=torch.float64)
        sign[: dim // 2] = -1
        if dim % 2:
            sign[-1] = 0
            spread *= math.sqrt(dim / max(dim - 1, 1))
        return cls.from_eigenvalues(mean + spread * sign, temperature=temperature)

    @property
    def rank(self) -> int:
        """The largest rank that W_QK can have."""
        return min(self.query.shape[-2:])

    def _tensors(self) -> dict[str, Any]:
        names = ("query", "key", "query_bias", "key_bias", "distance_bias")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _norms(self) -> dict[str, Any]:
        names = ("query_norm", "key_norm")
        return {name: norm for name in names if (norm := getattr(self, name)) is not None}

    def under(
        self,
        covariance: Float[Tensor, "model model"] | None = None,
        mean: Float[Tensor, " model"] | None = None,
    ) -> QKForm:
        """The form with its norms at their root mean square for tokens of this covariance.

        Scaling the weights before a norm then changes nothing, as in the model.  A form without
        norms is returned as it is.

        >>> rows = torch.eye(2, 3)[None]
        >>> norm = HeadNorm(rows, torch.tensor([2.0]).sqrt())
        >>> form = QKForm(rows, rows, temperature=1.0, query_norm=norm)
        >>> form.under(4 * torch.eye(3)).trace()
        tensor([1.])
        """
        norms = self._norms().items()
        return self.sized({name: norm.mean_square(covariance, mean).sqrt() for name, norm in norms})

    def sized(self, sizes: dict[str, Float[Tensor, "*heads"]]) -> QKForm:
        """The form with the norms of these names at these sizes."""
        changes: dict[str, Any] = {}
        for name, size in sizes.items():
            norm: HeadNorm = getattr(self, name)
            ratio = norm.size.double() / size
            side = name.removesuffix("_norm")
            changes |= {
                name: replace(norm, size=size),
                side: norm.scaled(getattr(self, side), ratio, -2),
            }
            bias = getattr(self, f"{side}_bias")
            if bias is not None:
                changes[f"{side}_bias"] = norm.apply(bias, ratio)
        return replace(self, **changes) if changes else self

    def __getitem__(self, heads: Any) -> QKForm:
        """Some heads of the stack, by whatever indexes its axes: form[3], form[2:4], form[0, 1].

        >>> QKForm(torch.ones(4, 1, 2), torch.ones(4, 1, 2), 1.0)[1:3].trace()
        tensor([2., 2.])
        """
        index = heads if isinstance(heads, tuple) else (heads,)
        stack = tuple(self.query.shape[:-2])
        try:
            if len(index) > len(stack):
                raise IndexError("too many indices")
            parts: dict[str, Any] = {
                name: value[(*index, ...)] for name, value in self._tensors().items()
            }
        except IndexError as error:
            raise InputError(
                f"a stack of heads {stack} has no [{', '.join(map(str, index))}].",
                hint="index the axes before (head, model), counted from 0.",
            ) from error
        norms = {name: norm.taken(index) for name, norm in self._norms().items()}
        relative = self.relative and self.relative.mapped(lambda _, table: table[(*index, ...)])
        return replace(self, **parts, **norms, relative=relative)

    @property
    def T(self) -> QKForm:  # noqa: N802
        """The transpose of W_QK, without the biases, rotation and distances of its roles."""
        return QKForm(self.key, self.query, self.temperature, is_symmetric=self.is_symmetric)

    def __sub__(self, other: QKForm) -> QKForm:
        """The difference of two W_QK alone, as a form of twice the head dimension.

        W − W' = [Q − Q'; Q]ᵀ [K'; K − K']: for nearby forms nothing large cancels.

        >>> form = QKForm(torch.eye(2, 3), torch.ones(2, 3), temperature=1.0)
        >>> (form - form).frobenius_squared()
        tensor(0.)
        """
        if self.query.shape[-1] != other.query.shape[-1] or self.temperature != other.temperature:
            raise InputError(
                f"a form on {self.query.shape[-1]} dimensions with temperature "
                f"{self.temperature:g} less one on {other.query.shape[-1]} with "
                f"{other.temperature:g}.",
                hint="give both the same; replace(form, temperature=...) changes one.",
            )
        if self.query.shape == other.query.shape:
            query = torch.cat((self.query - other.query, self.query), -2)
            key = torch.cat((other.key, self.key - other.key), -2)
        else:
            query = torch.cat((self.query, -other.query), -2)
            key = torch.cat((self.key, other.key), -2)
        symmetric = self.is_symmetric and other.is_symmetric
        return QKForm(query, key, self.temperature, is_symmetric=symmetric)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> QKForm:
        """Return the same form in another dtype or on another device."""
        moved: dict[str, Any] = {
            name: value.to(device=device, dtype=dtype) for name, value in self._tensors().items()
        }
        rotary = self.rotary and Rotary(
            self.rotary.frequencies.to(device=device, dtype=dtype), self.rotary.layout
        )
        norms = {name: norm.to(device) for name, norm in self._norms().items()}
        relative = self.relative and self.relative.mapped(
            lambda _, table: table.to(device=device, dtype=dtype)
        )
        return replace(self, **moved, **norms, rotary=rotary, relative=relative)

    def at_offset(self, offset: int) -> QKForm:
        """The form of a query and the key so many tokens before it: W_Qᵀ R W_K, no longer turning.

        What a key's bias adds is then the same for all keys and left out.
        """
        if self.rotary is None:
            return self
        key = self.key
        if offset:
            key = key.double()
            angle = torch.tensor(float(-offset), dtype=torch.float64, device=key.device)
            rotary = Rotary(self.rotary.frequencies.double(), self.rotary.layout)
            key = rotary.turn(key.mT, rotary.phases(angle)).mT
        return replace(self, query=self.query.to(key), key=key, rotary=None, key_bias=None)

    def balanced(self) -> QKForm:
        """The same logits from factors within reach of squares, and λ to match.

        Only sizes beyond 10^±40 are moved, by powers of 2, which change no digit.
        """
        sizes = [largest(part) for part in (self.query, self.key)]
        if all(size == 0 or 1e-40 < size < 1e40 for size in sizes):
            return self
        query, key = (math.frexp(size)[1] if size else 0 for size in sizes)
        # beyond 2^1000 logits are nothing, and need not be nearer to it
        power = min(-query - key, 1000 - math.frexp(self.temperature)[1])
        temperature = math.ldexp(self.temperature, power)
        if not temperature > 0:
            raise InputError(
                f"W_QK / temperature is beyond all numbers: factors of {sizes[0]:.0e} and "
                f"{sizes[1]:.0e}.",
                hint="the weights diverged or were read wrongly; use an earlier checkpoint.",
            )
        scaled: dict[str, Any] = {
            name: torch.ldexp(value.double(), torch.tensor(-(query if "query" in name else key)))
            for name, value in self._tensors().items()
            if name != "distance_bias"
        }
        power_of_key = torch.tensor(-key)
        relative = self.relative and self.relative.mapped(
            lambda name, table: (
                table if name == "bias" else torch.ldexp(table.double(), power_of_key)
            )
        )
        return replace(self, **scaled, temperature=temperature, relative=relative)

    def matrix(self) -> Float[Tensor, "*heads model model"]:
        """The dense W_QK; for small models and for tests."""
        return self.query.mT @ self.key

    def trace(self) -> Float[Tensor, "*heads"]:
        """tr(W_QK), the sum of its eigenvalues, in head·model operations per head."""
        return Spectrum(self.query, self.key, self.temperature).trace

    def trace_of_square(self) -> Float[Tensor, "*heads"]:
        """tr(W_QK²), the sum of squared eigenvalues; negative when they are mostly imaginary."""
        return Spectrum(self.query, self.key, self.temperature).trace_of_square

    def frobenius_squared(self) -> Float[Tensor, "*heads"]:
        """‖W_QK‖²_F = tr(W_QKᵀ W_QK), the scale that LocAteR shrinks (Section 6)."""
        return Spectrum(self.query, self.key, self.temperature).frobenius_squared

    def spectrum(
        self,
        covariance: Float[Tensor, "model model"] | None = None,
        *,
        share: int = 1,
        gain: Float[Tensor, " model"] | None = None,
    ) -> Spectrum:
        """The eigenspectrum of the paper's W = W_QK Σ, in float64; Σ = I by default.

        With `share`, so many neighboring heads have the same key, which is then multiplied once.
        `gain` multiplies the tokens' dimensions first.  Factors of 16 bits or fewer are multiplied
        in float32, whose rounding is a thousandth of theirs.
        """
        form = self if covariance is None else self.under(covariance)
        sides = form.query, form.key[::share]
        if gain is not None:
            sides = sides[0].detach(), sides[1].detach()
        if covariance is not None:
            check_covariance(covariance, size=form.query.shape[-1])
        is_short = covariance is None and all(side.dtype.itemsize < 4 for side in sides)
        for dtype in (torch.float32, torch.float64) if is_short else (torch.float64,):
            query, key = (side.to(dtype, copy=gain is not None) for side in sides)
            if gain is not None:
                query, key = query.mul_(gain.to(query)), key.mul_(gain.to(key))
            sigma = None if covariance is None else covariance.to(query)
            made = Spectrum(query, key, self.temperature, sigma, self.is_symmetric).in_double()
            grams = (made.query_gram, made.key_gram)
            sizes = [gram.diagonal(dim1=-2, dim2=-1).amax().item() for gram in grams]
            if sizes[0] * sizes[1] < 1e280:
                return made
        raise InputError(
            f"factors of {math.sqrt(sizes[0]):.0e} and {math.sqrt(sizes[1]):.0e} have a W_QK whose "
            "square is beyond all numbers.",
            hint="the weights diverged or were read wrongly; use an earlier checkpoint.",
        )
