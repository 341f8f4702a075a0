"""What a head would do: other lengths, other rotations, other scales, from moments it keeps.

A head is taken as a form on its own queries and keys: tokens are the vectors (q, k) of 2 · head
dimensions before any rotation, Gaussian with the moments that a text gave, W_Q = [I 0] and
W_K = [0 I].  Everything that is known of forms and processes then answers for it, without the model
and without the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from locater.core.form import Layout, QKForm, Rotary
from locater.core.process import TokenProcess
from locater.core.score import HeadMoments, LogitDraws
from locater.core.theory import attention_entropy
from locater.engines import one_thread
from locater.errors import ConfigError, InputError
from locater.files import write_file
from locater.models.live import find_attention
from locater.models.positions import stretched
from locater.notebook import Shown
from locater.probe.samples import at_once, collect

_PARTS = ("kernel", "covariance", "mean", "query_bias", "key_bias", "frequencies", "distance_bias")
BAR = (0.1, 0.2, 0.25)
"""Nats, share of the predicted change, and nats for every factor of e in length: within their sum
lay nine of ten measured changes of entropy of real heads (docs/what-if.md, results/interventions
and results/what-if)."""
QUANTILE = 0.999
"""Of the largest logit of a row: how far it reaches in one row of a thousand."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerMoments:
    """Gaussian moments of the queries and keys of one attention, before rotation."""

    name: str
    layer: int
    temperature: float
    kernel: Float[Tensor, "heads tokens tokens"]
    covariance: Float[Tensor, "heads both both"]
    mean: Float[Tensor, "heads tokens both"]
    query_bias: Float[Tensor, "heads head"] | None = None
    key_bias: Float[Tensor, "heads head"] | None = None
    frequencies: Float[Tensor, " pairs"] | None = None
    layout: Layout = "half"
    base: float = 10_000.0
    """Of the rotary frequencies."""
    distance_bias: Float[Tensor, "heads distances"] | None = None

    @classmethod
    def of(
        cls,
        form: QKForm,
        inputs: Float[Tensor, "blocks tokens model"],
        *,
        name: str = "",
        layer: int = 0,
        base: float = 10_000.0,
    ) -> LayerMoments:
        """Project the tokens, normalize where the model does, and take moments head by head."""
        form, inputs = form.to(torch.float64), inputs.double()
        sides = []
        for side in ("query", "key"):
            rows = torch.einsum("ntm,ahm->anth", inputs, getattr(form, side))
            norm = getattr(form, f"{side}_norm")
            if norm is not None:  # exactly, with its biases
                bias = getattr(form, f"{side}_bias")
                rows = rows if bias is None else rows + bias[:, None, None]
                rows = norm.apply(rows, norm.factor(inputs).movedim(-1, 0))
            sides.append(rows)
        found = [TokenProcess.from_samples(tokens, fit="traces") for tokens in torch.cat(sides, -1)]
        means = [one.mean for one in found if one.mean is not None]
        covariances = [one.covariance for one in found if one.covariance is not None]
        return cls(
            name=name,
            layer=layer,
            temperature=form.temperature,
            kernel=torch.stack([one.kernel for one in found]),
            covariance=torch.stack(covariances),
            mean=torch.stack(means),
            query_bias=form.query_bias if form.query_norm is None else None,
            key_bias=form.key_bias if form.key_norm is None else None,
            frequencies=None if form.rotary is None else form.rotary.frequencies,
            layout="half" if form.rotary is None else form.rotary.layout,
            base=base,
            distance_bias=form.distance_bias,
        )

    def __len__(self) -> int:
        return len(self.kernel)

    @property
    def tokens(self) -> int:
        """T of the blocks that the moments come from."""
        return self.kernel.shape[-1]

    def head(self, place: int) -> tuple[QKForm, TokenProcess]:
        """One head as a form on its own queries and keys, and the process that these follow."""
        size = self.covariance.shape[-1] // 2
        eye = torch.eye(2 * size, dtype=torch.float64)

        def own(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[place].double()

        rotary = None
        if self.frequencies is not None:
            rotary = Rotary(self.frequencies.double(), self.layout)
        form = QKForm(
            eye[:size],
            eye[size:],
            self.temperature,
            own(self.query_bias),
            own(self.key_bias),
            rotary,
            own(self.distance_bias),
        )
        kernel, covariance, mean = (
            part[place].double() for part in (self.kernel, self.covariance, self.mean)
        )
        return form, TokenProcess(kernel, covariance, mean, is_known=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class Moments:
    """What a text gave of every self-attention of a model; `save` and `load` keep it in a file."""

    model: str
    blocks: int
    context: int
    """The number of tokens that the model was made for, as far as it says."""
    layers: tuple[LayerMoments, ...]

    def save(self, path: Path) -> Path:
        """Write a safetensors file of float32 numbers, whole or not at all."""
        tensors = {
            f"{place}.{part}": getattr(layer, part).float().contiguous()
            for place, layer in enumerate(self.layers)
            for part in _PARTS
            if getattr(layer, part) is not None
        }
        about = [
            {"name": one.name, "layer": one.layer, "temperature": one.temperature,
             "layout": one.layout, "base": one.base}
            for one in self.layers
        ]  # fmt: skip
        head = {"kind": "locater moments", "model": self.model, "blocks": str(self.blocks),
                "context": str(self.context),
                "layers": json.dumps(about)}  # fmt: skip
        return write_file(path, save(tensors, metadata=head))

    @classmethod
    def load(cls, path: Path) -> Moments:
        """Read what `save` wrote; nothing is executed."""
        try:
            with safe_open(str(path), framework="pt") as file:
                head = file.metadata() or {}
                if head.get("kind") != "locater moments":
                    raise InputError(
                        f"{path} holds no moments.", hint="`locater moments` writes such a file."
                    )
                names = set(file.keys())
                layers = tuple(
                    LayerMoments(
                        **about,
                        **{
                            part: file.get_tensor(name)
                            for part in _PARTS
                            if (name := f"{place}.{part}") in names
                        },
                    )
                    for place, about in enumerate(json.loads(head["layers"]))
                )
            for layer in layers:
                _check(layer)
            numbers = {name: int(head[name]) for name in ("blocks", "context")}
            return cls(model=head["model"], layers=layers, **numbers)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} cannot be read as moments: {error}.",
                hint="it was cut or changed: make it again with `locater moments`.",
            ) from error


def _check(layer: LayerMoments) -> None:
    """Refuse numbers that no text gives."""
    heads, tokens, both = layer.mean.shape
    shapes = {"kernel": (heads, tokens, tokens), "covariance": (heads, both, both)}
    for name, shape in shapes.items():
        if getattr(layer, name).shape != shape or both % 2:
            raise ValueError(f"{layer.name} has a {name} of {tuple(getattr(layer, name).shape)}")
    for name in _PARTS:
        part = getattr(layer, name)
        if part is not None and not bool(torch.isfinite(part).all()):
            raise ValueError(f"{layer.name} has NaN or infinite numbers as {name}")


def moments(
    model: nn.Module,
    blocks: Tensor,
    *,
    name: str = "",
    layers: str | None = None,
    batch: int = 16,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Moments:
    """Run the model on blocks of a text and keep the moments of its heads' queries and keys.

    One attention is sampled at a time where all of them together would not fit: each pass holds
    blocks · tokens · model floats.
    """
    found = [
        one
        for one in find_attention(model, layers=layers)
        if one.layout.kind == "self" and one.module is not None
    ]
    if not found:
        raise InputError(
            "the model has no self-attention whose queries and keys can be read.",
            hint="`locater probe` measures any model.",
        )
    if len(blocks) < 8:
        raise InputError(f"{len(blocks)} blocks are too few.", hint="give hundreds.")
    some = at_once(found, blocks)
    made: list[LayerMoments] = []
    for start in range(0, len(found), some):
        few = found[start : start + some]
        for sample in collect(model, few, blocks, keep=len(blocks), batch=batch):
            layout = sample.attention.layout
            form = sample.attention.form(distances=blocks.shape[1])
            form = form.to(torch.float64, torch.device("cpu"))
            with one_thread():
                made.append(
                    LayerMoments.of(
                        form,
                        sample.inputs,
                        name=layout.name,
                        layer=layout.layer,
                        base=layout.rotary.base if layout.rotary else 10_000.0,
                    )
                )
            report(len(made), len(found))
    said = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    context = said if isinstance(said, int) else blocks.shape[1]
    return Moments(model=name, blocks=len(blocks), context=context, layers=tuple(made))


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is done to every head."""

    tokens: int | None = None
    """T: another length than that of the blocks the moments come from."""
    scale: float = 1.0
    """W_QK, with its biases, times this."""
    temperature: float = 1.0
    """λ times this."""
    rope_scaling: str = ""
    """Other rotary positions: off, base:1e6, linear:4, ntk:4 or yarn:4."""
    query_bias: bool = True
    """Keep the biases of queries; --no-query-bias takes them away."""
    centered_keys: bool = False
    """Take the keys' means and biases away."""

    def __post_init__(self) -> None:
        if self.scale < 0 or not self.temperature > 0:
            raise ConfigError(
                f"scale must be zero or more and temperature positive, got {self.scale} and "
                f"{self.temperature}.",
                hint="1 leaves them as they are.",
            )
        if self.tokens is not None and self.tokens < 2:
            raise ConfigError(
                f"tokens must be 2 or more, got {self.tokens}.", hint="4096, for example."
            )
        kind, _, factor = self.rope_scaling.partition(":")
        if kind not in ("", "off", "base", "linear", "ntk", "yarn") or (
            kind not in ("", "off") and not _positive(factor)
        ):
            raise ConfigError(
                f"rope_scaling cannot be {self.rope_scaling!r}.",
                hint="use off, base:1e6, linear:4, ntk:4 or yarn:4.",
            )

    def of(
        self, form: QKForm, process: TokenProcess, *, base: float = 10_000.0, context: int = 2048
    ) -> tuple[QKForm, TokenProcess]:
        """The head after it; `base` and `context` are those of the model's own rotation."""
        temperature = form.temperature * self.temperature
        if self.scale != 1:
            query_bias = None if form.query_bias is None else form.query_bias * self.scale
            form = replace(form, query=form.query * self.scale, query_bias=query_bias)
        if not self.query_bias:
            form = replace(form, query_bias=None)
        if self.centered_keys:
            form = replace(form, key_bias=None)
            size = form.key.shape[-2]
            if process.mean is not None:
                mean = process.mean.clone()
                mean[:, size:] = 0
                process = replace(process, mean=mean, is_known=True)
        if form.rotary is not None and self.rope_scaling:
            rotary, magnitude = self._rotary(form.rotary, base, context)
            form, temperature = replace(form, rotary=rotary), temperature / magnitude**2
        if self.tokens is not None and self.tokens != process.tokens:
            process = process.continued(self.tokens)
        return replace(form, temperature=temperature), process

    def _rotary(self, rotary: Rotary, base: float, context: int) -> tuple[Rotary | None, float]:
        kind, _, factor = self.rope_scaling.partition(":")
        if kind == "off":
            return None, 1.0
        frequencies, magnitude = stretched(
            rotary.frequencies, kind, float(factor), base=base, original=context
        )
        return Rotary(frequencies, rotary.layout), magnitude


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What the last query of one head does, over drawn rows."""

    entropy: float
    entropy_error: float
    """Of the drawing alone."""
    sink_mass: float
    own_mass: float
    distance: float
    """Mean distance to what it looks at, in tokens."""
    largest: float
    """The 99.9 % quantile of a row's largest logit, above the row's mean."""


def outlook(form: QKForm, process: TokenProcess, draws: int, generator: torch.Generator) -> Outlook:
    """Draw rows of logits from their exact law and look at them."""
    rows = LogitDraws.of(process, draws, generator).rows(HeadMoments.of(form, process), generator)
    logits = torch.cat(list(rows), 1)[0]
    return look(logits)


def look(logits: Float[Tensor, "rows tokens"]) -> Outlook:
    """What rows of logits say: drawn ones, or a model's own."""
    attention = torch.softmax(logits, -1)
    entropy = attention_entropy(attention)
    mean = attention.mean(0)
    back = torch.arange(logits.shape[-1] - 1, -1, -1).to(mean)
    largest = logits.amax(-1) - logits.mean(-1)
    return Outlook(
        entropy=entropy.mean().item(),
        entropy_error=(entropy.std() / math.sqrt(len(entropy))).item(),
        sink_mass=mean[0].item(),
        own_mass=mean[-1].item(),
        distance=(mean * back).sum().item(),
        largest=largest.double().quantile(QUANTILE).item(),
    )


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class WhatIf(Shown):
    """Every head before and after a change."""

    model: str
    change: Change
    tokens: int
    rows: tuple[dict[str, Any], ...]
    """One plain dictionary per head: name, layer, head, and every number of `Outlook` with
    `_before` and `_after`."""

    _picture = ("rect", "head:O", "layer:O", "entropy_after:Q")

    def _line(self) -> str:
        return f"{self.model}, {len(self.rows)} heads, {self.tokens} tokens"

    def _table(self) -> list[dict[str, Any]]:
        return list(self.rows)

    @property
    def summary(self) -> dict[str, float]:
        """Means over heads."""
        names = [name for name in self.rows[0] if name.endswith(("_before", "_after"))]
        return {name: sum(row[name] for row in self.rows) / len(self.rows) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "model": self.model,
            "tokens": self.tokens,
            "change": asdict(self.change),
            "summary": self.summary,
            "heads": list(self.rows),
        }


def change_bar(change: float, ratio: float = 1.0) -> float:
    """How far off a predicted change of entropy is in nine heads of ten, as seen on real models.

    >>> round(change_bar(-0.5), 3), round(change_bar(0.5, ratio=8.0), 2)
    (0.2, 0.72)
    """
    least, share, longer = BAR
    return least + share * abs(change) + longer * abs(math.log(ratio))


def what_if(
    known: Moments,
    change: Change,
    *,
    draws: int = 400,
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> WhatIf:
    """Predict what every head would do after a change, from moments alone."""
    if draws < 2:
        raise ConfigError(f"draws must be 2 or more, got {draws}.", hint="400 is usual.")
    rows: list[dict[str, Any]] = []
    total = sum(map(len, known.layers))
    with one_thread():
        for layer, place in _heads(known.layers):
            form, process = layer.head(place)
            row: dict[str, Any] = {"name": layer.name, "layer": layer.layer, "head": place}
            after = change.of(form, process, base=layer.base, context=known.context)
            for when, pair in (("before", (form, process)), ("after", after)):
                generator = torch.Generator().manual_seed(seed)
                for name, value in asdict(outlook(*pair, draws, generator)).items():
                    row[f"{name}_{when}"] = value
            row["entropy_change"] = row["entropy_after"] - row["entropy_before"]
            ratio = (change.tokens or layer.tokens) / layer.tokens
            row["entropy_change_bar"] = change_bar(row["entropy_change"], ratio)
            rows.append(row)
            report(len(rows), total)
    tokens = change.tokens or known.layers[0].tokens
    return WhatIf(model=known.model, change=change, tokens=tokens, rows=tuple(rows))


def _heads(layers: Sequence[LayerMoments]) -> Iterator[tuple[LayerMoments, int]]:
    for layer in layers:
        for place in range(len(layer)):
            yield layer, place
