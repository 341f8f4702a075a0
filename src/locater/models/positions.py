"""What families add to a logit because of positions: rotary frequencies, ALiBi slopes, T5 buckets.

Everything is read from a config mapping, old spellings and new, and computed without the model.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.core.form import Layout, Relative, Rotary

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """How one attention turns its queries and keys with the position."""

    frequencies: tuple[float, ...]  # radians per token, one for each pair of dimensions
    layout: Layout = "half"
    base: float = 10_000.0
    scaling: str = "default"
    """The rule that stretched the frequencies for longer texts: linear, llama3, yarn, …"""
    magnitude: float = 1.0
    """What the turned dimensions of query and key are both multiplied by (yarn, longrope)."""
    is_sectioned: bool = False
    """Tokens of pictures have several positions, each for a section of the pairs (Qwen-VL)."""

    @property
    def dimensions(self) -> int:
        """How many dimensions of the head turn."""
        return 2 * len(self.frequencies)

    def rotary(self) -> Rotary:
        """The rotation itself, in float64."""
        return Rotary(torch.tensor(self.frequencies, dtype=torch.float64), self.layout)


def rotary_spec(
    config: Config, *, head_dim: int, layer: int, layout: Layout, turned: int | None = None
) -> RotarySpec | None:
    """Read the rotary embedding of one layer; None where the config switches it off.

    `turned` is how many dimensions turn, where their tensor tells.
    """
    bases = config.get("layer_rope_theta") or ()
    if layer < len(bases) and not bases[layer]:  # Muse
        return None
    skipped = config.get("no_rope_layers") or ()
    if layer < len(skipped) and not skipped[layer]:
        return None
    stored = first_of(config, "rope_parameters") or {}
    kind = layer_type(config, layer)
    if kind in stored and stored[kind] is None:
        return None
    rope = rope_settings(config, layer)
    stretched = config.get("rope_scaling_layers")
    if stretched is not None and layer not in stretched:  # Molmo 2
        rope = {"rope_theta": rope["rope_theta"]}
    base = float(rope["rope_theta"])
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    share = float(rope.get("partial_rotary_factor") or 1.0)
    dimensions = turned or int(config.get("rotary_dim") or int(head_dim * share))
    if kind == "proportional":  # the others turn by nothing
        exponents = torch.arange(0, 2 * int(share * head_dim // 2), 2, dtype=torch.float64)
        plain = torch.nn.functional.pad(
            base ** (-exponents / head_dim), (0, head_dim // 2 - len(exponents))
        )
    else:
        plain = Rotary.from_base(dimensions, base=base).frequencies
    frequencies, magnitude = _stretched(plain, kind, rope, config, base)
    return RotarySpec(
        frequencies=tuple(frequencies.tolist()),
        layout=layout,
        base=base,
        scaling=kind,
        magnitude=magnitude,
        is_sectioned="mrope_section" in rope,
    )


def rope_settings(config: Config, layer: int) -> dict[str, Any]:
    """Gather a layer's rotary settings, whichever spelling the config uses."""
    kind = layer_type(config, layer)
    local = kind == "sliding_attention"
    own, assumed = _said(config)
    stored = _of_layer(own.get("rope_parameters") or own.get("rope_scaling") or {}, kind)
    if local and "rope_local_base_freq" in own and "rope_parameters" not in own:
        stored = {}  # Gemma 3 stretches its global layers only
    spelled = {
        "rope_theta": first_of(
            own,
            "rope_local_base_freq" if local else "",  # Gemma 3
            "local_rope_theta" if local else "global_rope_theta",  # ModernBERT
            "rope_theta",
            "rotary_emb_base",
            "rotary_embedding_base",
        ),
        "partial_rotary_factor": first_of(own, "partial_rotary_factor", "rotary_pct"),
        "original_max_position_embeddings": first_of(
            config, "original_max_position_embeddings", "max_position_embeddings"
        ),
    }
    usual = {"rope_theta": 10_000.0, **_of_layer(assumed.get("rope_parameters") or {}, kind)}
    said = {key: value for key, value in (spelled | stored).items() if value is not None}
    return {**usual, **said}


def _said(config: Config) -> tuple[Config, Config]:
    """What a config says itself, and what its type assumes."""
    if not isinstance(config, ChainMap):
        return config, {}
    return config.maps[0], ChainMap(*config.maps[1:])


def _of_layer(stored: Config, kind: str) -> dict[str, Any]:
    """Of settings that may be given for each kind of layer, those of one."""
    if any(isinstance(value, Mapping) for value in stored.values()):
        stored = stored.get(kind) or {}
    return dict(stored)


def layer_type(config: Config, layer: int) -> str:
    """Name what kind of attention a layer has, `full_attention` where nothing else is said."""
    for said in _said(config):
        types = said.get("layer_types") or ()
        if isinstance(types, Mapping):  # a pattern that repeats
            types = [types["every"][layer % len(types["every"])]] * (layer + 1)
        if layer < len(types):
            return str(types[layer])
        every = first_of(said, "sliding_window_pattern", "_sliding_window_pattern")
        if isinstance(every, int) and every > 0:
            return "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
        every = said.get("global_attn_every_n_layers")
        if isinstance(every, int) and every > 0:
            return "full_attention" if layer % every == 0 else "sliding_attention"
    return "full_attention"


def first_of(config: Config, *keys: str) -> Any:
    """The first of these settings that a config says itself, else that its type assumes."""
    for said in config.maps if isinstance(config, ChainMap) else (config,):
        for key in keys:
            if said.get(key) is not None:
                return said[key]
    return None


def stretched(
    plain: Float[Tensor, " pairs"], kind: str, factor: float, *, base: float, original: int
) -> tuple[Float[Tensor, " pairs"], float]:
    """Frequencies after one of the usual changes, and what query and key are multiplied by.

    `base` puts another base in place of the model's, `linear` divides positions, `ntk` raises the
    base so that the slowest pair turns `factor` times slower, `yarn` does so by parts.
    """
    if kind in ("base", "ntk"):
        pairs = len(plain)
        step = torch.arange(pairs).to(plain) / pairs
        grown = factor / base if kind == "base" else factor ** (pairs / max(pairs - 1, 1))
        return plain * grown**-step, 1.0
    settings = {"factor": factor, "original_max_position_embeddings": original}
    return _stretched(plain, kind, settings, {}, base)


def _stretched(
    plain: Float[Tensor, " pairs"], kind: str, rope: Config, config: Config, base: float
) -> tuple[Float[Tensor, " pairs"], float]:
    """Apply the rule by which a model's rotary embedding was stretched to longer texts."""
    factor = rope.get("factor")
    original = rope.get("original_max_position_embeddings") or 1
    if kind in ("linear", "proportional"):
        return plain / float(factor or 1.0), 1.0
    if kind == "llama3":
        turns = original * plain / (2 * math.pi)  # within the original context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    if factor is None:
        factor = config.get("max_position_embeddings", original) / original
    if kind == "yarn":
        keep = _yarn_share(len(plain), rope, base, original)
        return plain * (keep + (1 - keep) / factor), _yarn_magnitude(rope, factor)
    if kind in ("longrope", "su"):
        short = torch.tensor(rope["short_factor"], dtype=torch.float64)
        grown = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
        return plain / short, float(rope.get("attention_factor") or grown)
    return plain, 1.0  # dynamic: unchanged up to the original length


def _yarn_share(pairs: int, rope: Config, base: float, original: int) -> Float[Tensor, " pairs"]:
    """How much of each frequency yarn leaves as it was."""
    size = 2 * pairs

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    step = torch.arange(pairs, dtype=torch.float64)
    return 1 - ((step - low) / ((high - low) or 0.001)).clamp(0, 1)


def latent_magnitude(config: Config) -> float:
    """What latent attention multiplies its logits by where yarn stretches positions."""
    rope = rope_settings(config, 0)
    factor, weight = rope.get("factor"), rope.get("mscale_all_dim")
    return _grown(float(weight), factor) ** 2 if factor and weight else 1.0


def _grown(weight: float, factor: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_magnitude(rope: Config, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _grown(rope["mscale"], factor) / _grown(rope["mscale_all_dim"], factor)
    return _grown(1.0, factor)


def alibi_slopes(heads: int) -> Float[Tensor, " heads"]:
    """The slopes of ALiBi: a geometric sequence, interleaved with a finer one where it must be.

    >>> alibi_slopes(2)
    tensor([0.0625, 0.0039], dtype=torch.float64)
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * k / power) for k in range(1, power + 1)]
    slopes += [2 ** (-4 * k / power) for k in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float64)


def relative_buckets(
    distances: int, *, buckets: int, max_distance: int, bidirectional: bool
) -> Int[Tensor, " distances"]:
    """The bucket of T5's relative bias for the key k tokens back.

    >>> relative_buckets(6, buckets=8, max_distance=16, bidirectional=True).tolist()
    [0, 1, 2, 2, 2, 2]
    """
    half = buckets // 2 if bidirectional else buckets  # the other half belongs to keys ahead
    exact = half // 2
    distance = torch.arange(distances)
    far = (distance.clamp_min(1).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (far * (half - exact)).long()
    return torch.where(distance < exact, distance, far.clamp_max(half - 1))


@dataclass(frozen=True, kw_only=True)
class RelativeSpec:
    """Stored tables of what a logit gains for where its key stands from its query."""

    rule: Literal["grid products", "grid bias", "products", "sinusoids", "bias"]
    tensors: tuple[str, ...] = ()
    """Tables by rows and by columns; one table; or a projection of sinusoids and two biases."""
    ahead: int | None = None
    """Entries for keys after the query; None: half of them."""
    is_reversed: bool = False
    """Entries begin with the key that lies farthest back."""
    is_bounded: bool = False
    """Offsets past the end of the table gain nothing."""

    @property
    def words(self) -> str:
        """What is added, for a caveat."""
        what = "a number" if self.rule.endswith("bias") else "a product with the query"
        said = f"{what} for the relative place of its key joins each logit, beside W_QK"
        if not self.rule.startswith("grid"):
            return said
        return f"{said}; ρ and entropy have it where the tokens fit into its rows and columns"

    def relative(
        self, tensors: Mapping[str, Tensor], *, heads: int, temperature: float, distances: int
    ) -> Relative:
        """The tables as a form takes them, for every query head."""
        tables = [tensors[name].detach() for name in self.tensors]
        if self.rule == "grid products":  # of the query as it is, not divided by λ
            rows, columns = ((table * temperature).expand(heads, *table.shape) for table in tables)
            sizes = [(len(table) + 1) // 2 for table in tables]
            return Relative(columns, rows, grid=(sizes[0], sizes[1]))
        if self.rule == "grid bias":
            side = math.isqrt(len(tables[0]))
            bias = tables[0].mT.reshape(heads, side, side)
            return Relative(bias=bias, grid=((side + 1) // 2, (side + 1) // 2))
        if self.rule == "sinusoids":
            return _sinusoids(*tables, heads=heads, temperature=temperature, distances=distances)
        table = tables[0].reshape(-1, tables[0].shape[-1])
        table = table.flip(0) if self.is_reversed else table
        half = (len(table) - self.is_reversed) // 2  # a middle entry is the query's own place
        ahead = half if self.ahead is None else self.ahead
        if self.is_bounded:
            table, ahead = torch.nn.functional.pad(table, (0, 0, 1, 1)), ahead + 1
        if self.rule == "bias":
            return Relative(bias=table.mT, ahead=ahead)
        return Relative(table.expand(heads, -1, -1), ahead=ahead)


def _sinusoids(
    weight: Float[Tensor, "rows model"],
    content: Float[Tensor, "heads head"],
    position: Float[Tensor, "heads head"],
    *,
    heads: int,
    temperature: float,
    distances: int,
) -> Relative:
    """Transformer-XL's terms (q + v)·W p(Δ), where the form's queries are q + u already."""
    offsets = torch.arange(1 - distances, distances).to(weight)
    width = weight.shape[-1]
    rates = 10_000.0 ** (-torch.arange(0, width, 2).to(weight) / width)
    angles = offsets[:, None] * rates
    waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)
    columns = (waves @ weight.mT).unflatten(-1, (heads, -1)).transpose(0, 1)
    moved = (position - content).reshape(heads, 1, -1)
    return Relative(columns, bias=(columns * moved).sum(-1) / temperature, ahead=distances - 1)
