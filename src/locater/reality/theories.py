"""Everybody's theory in one table: published quantities of a head against what the head does.

A row says what a paper computes of a head, from what, and how it is judged: by its error where it
names a number, by the rank correlation of heads where it orders them.  Quantities are computed on
one part of a text and held against attention on the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.core.bounds import entropy_lower_bound
from locater.core.form import QKForm
from locater.core.theory import attention_entropy
from locater.engines import one_thread
from locater.errors import LocaterError
from locater.models.live import LiveAttention
from locater.probe.rows import Logits
from locater.probe.samples import AttentionSamples
from locater.probe.watch import Place, Recorder
from locater.reality.against_theory import (
    Halves,
    RealityConfig,
    estimated,
    measure,
    predicted,
    rank_correlation,
)
from locater.reality.predictions import COLUMNS, Prediction

MEASURED = {
    "entropy": "entropy of the last query's attention, nats",
    "sharpness": "its largest weight",
    "sink": "its weight on the first key",
    "rank": "stable rank of the tokens after the head averaged them",
    "rho": "ρ, how often a token's gradient passes the softmax, mean over positions",
    "largest": "its largest logit above the row's mean",
}
"""What is measured of every head, on text that no quantity has seen."""
Kind = Literal["number", "bound", "order"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Facts:
    """What formulas may look at: one attention on the first part of a text."""

    form: QKForm
    inputs: Float[Tensor, "blocks tokens model"]
    logits: Float[Tensor, "blocks heads tokens"]
    """Of the last query, as the model computed them."""
    squares: dict[str, Float[Tensor, " heads"]]
    """What whole attention matrices of some blocks gave."""
    ours: dict[str, Prediction]

    @property
    def tokens(self) -> int:
        """T."""
        return self.logits.shape[-1]

    @cached_property
    def row_variance(self) -> Float[Tensor, "blocks heads"]:
        """Of the logits over the keys of a row."""
        return self.logits.var(-1, correction=0)

    @cached_property
    def cosine(self) -> float:
        """Mean cosine of two tokens of a block."""
        unit = torch.nn.functional.normalize(self.inputs.double(), dim=-1)
        pairs = unit.sum(1).square().sum(-1) - self.tokens
        return (pairs / (self.tokens * (self.tokens - 1))).mean().item()

    @cached_property
    def singular_values(self) -> Float[Tensor, "heads rank"]:
        """Of W_QK."""
        return self.form.spectrum().singular_values


def random_energy(variance: Float[Tensor, "*rows"], tokens: int) -> Float[Tensor, "*rows"]:
    """Entropy of T independent Gaussian logits, ln T − v/2 until it freezes at v = 2 ln T.

    >>> random_energy(torch.tensor([0.0, 4.0, 9.0]), 64)
    tensor([4.1589, 2.1589, 0.0000])
    """
    return (math.log(tokens) - variance / 2).clamp_min(0)


def spread_bound(spread: Float[Tensor, "*rows"], tokens: int) -> Float[Tensor, "*rows"]:
    """Least entropy of logits that differ by `spread` at most: no weight passes e^spread/T."""
    return (math.log(tokens) - spread).clamp_min(0)


def product_bound(facts: Facts) -> Float[Tensor, " heads"]:
    """Eq. 9 with the norm of a row as weights and tokens allow it: ‖W_QK‖₂ ‖x_T‖ ‖X‖₂/λ."""
    tokens = facts.inputs.double()
    centered = tokens - tokens.mean(1, keepdim=True)
    size = torch.linalg.matrix_norm(centered, 2) * tokens[:, -1].norm(dim=-1)
    norm = size[:, None] * facts.singular_values[:, 0] / facts.form.temperature
    return entropy_lower_bound(norm, facts.tokens).mean(0)


def critical_ratio(facts: Facts) -> Float[Tensor, " heads"]:
    """β/β_c with β = sd(ω)/√ln T and β_c = √(2/(1 − p)), p the mean cosine of tokens."""
    deviation = facts.logits.movedim(1, 0).flatten(1).std(-1)
    critical = math.sqrt(2 / max(1 - facts.cosine, 1e-12))
    return deviation / math.sqrt(math.log(facts.tokens)) / critical


def largest_score(
    facts: Facts, gamma: float = 2.0, chance: float = 1e-3
) -> Float[Tensor, " heads"]:
    """The score that T isotropic tokens pass with this chance at most, for W_QK of rank r.

    T exp(−d²α²/(γ r)) = chance, scores in units of ‖W_QK‖₂ ‖x‖²/λ.
    """
    rank, model = facts.singular_values.shape[-1], facts.form.query.shape[-1]
    alpha = math.sqrt(gamma * rank * math.log(facts.tokens / chance)) / model
    size = facts.inputs.double().square().sum(-1).mean()
    return alpha * facts.singular_values[:, 0] * size / facts.form.temperature


def symmetry(form: QKForm) -> Float[Tensor, " heads"]:
    """(‖W_s‖² − ‖W_n‖²)/‖W‖² of the symmetric and the skew part: tr(W²)/‖W‖²_F."""
    spectrum = form.spectrum()
    return spectrum.trace_of_square / spectrum.frobenius_squared


def directionality(form: QKForm, deviations: float = 2.0) -> Float[Tensor, " heads"]:
    """(r − c)/(r + c): norms of rows, and of columns, that stand out by so many deviations."""
    outside = []
    for first, second in ((form.query, form.key), (form.key, form.query)):
        gram = second.double() @ second.double().mT  # norms of rows of Q'K from K's Gram alone
        norms = torch.einsum("hdm,hde,hem->hm", first.double(), gram, first.double())
        norms = norms.clamp_min(0).sqrt()
        limit = norms.mean(-1, keepdim=True) + deviations * norms.std(-1, keepdim=True)
        outside.append(torch.where(norms > limit, norms, 0.0).sum(-1))
    rows, columns = outside
    return (rows - columns) / (rows + columns).clamp_min(1e-300)


def power_law(values: Float[Tensor, " values"]) -> float:
    """The exponent of a tail, by maximum likelihood; it begins where its law fits best.

    Clauset, Shalizi and Newman: α = 1 + n/Σ ln(x/x_min), x_min by the distance of Kolmogorov.
    """
    ordered = values.double().sort().values
    best = (math.inf, math.nan)
    for start in range(len(ordered) - 7):
        tail = ordered[start:]
        if tail[0] <= 0:
            continue
        count = len(tail)
        alpha = 1 + count / (tail / tail[0]).log().sum().clamp_min(1e-12).item()
        law = 1 - (tail / tail[0]) ** (1 - alpha)
        seen = torch.arange(count, dtype=torch.float64) / count
        gap = torch.maximum((law - seen).abs(), (law - seen - 1 / count).abs()).max().item()
        best = min(best, (gap, alpha))
    return best[1]


def tail_exponent(form: QKForm) -> Float[Tensor, " heads"]:
    """Mean exponent of the eigenvalues of WᵀW of the layer's W_Q and W_K; one for all its heads."""
    layers = [side.double().flatten(0, 1) for side in (form.query, form.key.unique(dim=0))]
    exponents = [power_law(torch.linalg.svdvals(layer).square()) for layer in layers]
    return form.query.new_full((len(form.query),), sum(exponents) / 2, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Theory:
    """One published quantity of a head."""

    name: str
    source: str
    knows: str
    target: str
    """What of MEASURED it is about."""
    kind: Kind
    formula: Callable[[Facts], Tensor]
    falls: bool = False
    """Whether the target falls where the quantity grows."""
    outside: str = ""
    """What it assumes that these heads do not have."""


_PAPER = "Bao, Hataya & Karakida 2402.02098"
_LOGITS = "logits of the last query"
THEORIES: tuple[Theory, ...] = (
    Theory(name="Eq. 6 as printed", source=_PAPER, knows="weights", target="rho", kind="number",
           formula=lambda facts: facts.ours["printed"].profile.rho.mean(-1),
           outside="tokens are no centred random walk with Σ = I"),
    Theory(name="Eq. 9, measured norms", source=f"{_PAPER}; Zhai et al. 2303.06296", knows=_LOGITS,
           target="entropy", kind="bound",
           formula=lambda facts: entropy_lower_bound(
               (facts.logits - facts.logits.mean(-1, keepdim=True)).norm(dim=-1), facts.tokens
           ).mean(0)),
    Theory(name="Eq. 9, norms of W_QK and tokens", source="Zhai et al. 2303.06296",
           knows="weights, tokens", target="entropy", kind="bound", formula=product_bound,
           outside="biases and rotation are not in it"),
    Theory(name="random energies, ln T − v/2", source="Derrida 1981, as used in 2505.24333",
           knows=_LOGITS, target="entropy", kind="number",
           formula=lambda facts: random_energy(facts.row_variance, facts.tokens).mean(0),
           outside="logits of a row are neither independent nor Gaussian"),
    Theory(name="β/β_c", source="Giorlandino & Goldt 2505.24333", knows=f"{_LOGITS}, tokens",
           target="entropy", kind="order", falls=True, formula=critical_ratio,
           outside="random weights at initialisation, T → ∞"),
    Theory(name="γ_c = 1/(1 − cosine)", source="Chen, Lin, Polyanskiy & Rigollet 2510.05554",
           knows="tokens", target="entropy", kind="order",
           formula=lambda facts: facts.logits.new_full(
               facts.logits.shape[1:2], 1 / max(1 - facts.cosine, 1e-12)),
           outside="W_QK = I, all pairs of tokens at one angle; the same for all heads of a layer"),
    Theory(name="dispersion, ln T − δ", source="Veličković et al. 2410.01104", knows=_LOGITS,
           target="entropy", kind="bound",
           formula=lambda facts: spread_bound(
               facts.logits.amax(-1) - facts.logits.amin(-1), facts.tokens).mean(0),
           outside="about T → ∞ at bounded logits"),
    Theory(name="variance of a row's logits", source="Hong & Lee, EMNLP 2025", knows=_LOGITS,
           target="entropy", kind="order", falls=True,
           formula=lambda facts: facts.row_variance.mean(0)),
    Theory(name="spectral energy in 4 directions", source="Qi et al. 2505.21910", knows="weights",
           target="entropy", kind="order", falls=True,
           formula=lambda facts: facts.singular_values[:, :4].square().sum(-1)
           / facts.singular_values.square().sum(-1),
           outside="about training that crashes; these models did not"),
    Theory(name="tail of the largest score", source="Emadi 2602.18851", knows="weights, norms",
           target="largest", kind="bound", formula=largest_score,
           outside="isotropic tokens; constants of the abstract with γ = 2"),
    Theory(name="symmetry of W_QK", source="Saponati et al. 2502.10927", knows="weights",
           target="entropy", kind="order", formula=lambda facts: symmetry(facts.form),
           outside="about objectives of training, not about entropy"),
    Theory(name="directionality of W_QK", source="Saponati et al. 2502.10927", knows="weights",
           target="sink", kind="order", falls=True,
           formula=lambda facts: directionality(facts.form),
           outside="about objectives of training, not about sinks"),
    Theory(name="mean attention on the first key", source="Gu et al. 2410.10781",
           knows="attention matrices", target="sink", kind="number",
           formula=lambda facts: facts.squares["sink"],
           outside="a definition, not a prediction: all queries stand for the last"),
    Theory(name="σ₁/σ₂ of attention", source="Nait Saada, Naderi & Tanner 2410.07799",
           knows="attention matrices", target="rank", kind="order", falls=True,
           formula=lambda facts: facts.squares["gap"],
           outside="random attention at initialisation"),
    Theory(name="α of W_Q and W_K", source="Martin & Mahoney 1901.08276 (WeightWatcher)",
           knows="weights", target="entropy", kind="order",
           formula=lambda facts: tail_exponent(facts.form),
           outside="about generalization; the same for all heads of a layer"),
)  # fmt: skip
"""Others' quantities; a new one is a row here."""
OURS = ("walk", "kernel", "means", "rotary", "full", "given_query", "clusters", "copy")


def _own(name: str) -> Theory:
    """One of our steps as a row: ρ where it has no entropy."""
    target = "rho" if name == "walk" else "entropy"

    def formula(facts: Facts) -> Tensor:
        made = facts.ours[name]
        return made.profile.rho.mean(-1) if made.entropy is None else made.entropy

    knows = {"walk": "weights", "copy": "attention itself"}.get(name, "weights, moments of tokens")
    source = "no theory" if name == "copy" else "here"
    return Theory(name=COLUMNS[name], source=source, knows=knows, target=target, kind="number",
                  formula=formula)  # fmt: skip


_EVERY = dict.fromkeys(THEORIES, "") | {_own(step): step for step in OURS}
"""All of them, others' first; ours with their steps."""


class _Squares(Recorder):
    """Whole attention matrices of a few blocks, reduced to numbers of heads as they come."""

    def __init__(self, model: nn.Module, attentions: list[LiveAttention]) -> None:
        super().__init__(model, attentions)
        self.found: dict[str, list[dict[str, Tensor]]] = {}

    def attention_called(self, place: Place, logits: Logits) -> Tensor | None:
        """Attention of all queries."""
        if place.layout is None:
            return None
        every = torch.arange(logits.shape[2], device=logits.device)
        rows, _ = logits.rows(slice(None), every)
        return torch.softmax(rows.double(), -1)[..., : logits.shape[2]].cpu()

    def attention_ends(self, place: Place, tokens: Tensor, answers: list[Any]) -> None:
        """Keep what the formulas and the measurement need, block by block."""
        if place.layout is not None:
            self.found.setdefault(place.name, []).append(
                of_squares(torch.cat(answers), tokens.double().cpu())
            )

    def mean(self, name: str, blocks: slice) -> dict[str, Tensor]:
        """Over some of the blocks."""
        parts = self.found[name]
        return {key: torch.cat([part[key] for part in parts])[blocks].mean(0) for key in parts[0]}


def of_squares(
    attention: Float[Tensor, "blocks heads queries keys"],
    tokens: Float[Tensor, "blocks keys model"],
) -> dict[str, Float[Tensor, "blocks heads"]]:
    """Attention on the first key, σ₁/σ₂, and the stable rank of the averaged tokens."""
    values = torch.linalg.svdvals(attention)
    gram = (tokens @ tokens.mT)[:, None]
    mixed = torch.linalg.eigvalsh(attention @ gram @ attention.mT).clamp_min(0)
    return {
        "sink": attention[..., 0].mean(-1),
        "gap": values[..., 0] / values[..., 1].clamp_min(1e-300),
        "rank": mixed.sum(-1) / mixed[..., -1].clamp_min(1e-300),
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class League:
    """Everybody's quantities of every head, and what the heads did."""

    tokens: int
    blocks: int
    heads: list[dict[str, Any]]
    """Layer, head, every measured quantity, and under `theories` every theory's value."""
    seconds: dict[str, float]
    skipped: dict[str, str]

    @property
    def theories(self) -> list[Theory]:
        """Those that had something to say, others' first."""
        return [one for one in _EVERY if one.name in self.heads[0]["theories"]]

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per theory: what it is, its error, and how it orders heads."""
        return [self._row(theory) for theory in self.theories]

    def _row(self, theory: Theory) -> dict[str, Any]:
        value = self._column(lambda head: head["theories"][theory.name])
        truth = {name: self._column(itemgetter(name)) for name in MEASURED}
        gap = value - truth[theory.target]
        row: dict[str, Any] = {
            name: getattr(theory, name)
            for name in ("name", "source", "knows", "target", "kind", "falls", "outside")
        }
        row["error"] = None if theory.kind == "order" else gap.abs().mean().item()
        order = {name: rank_correlation(value, seen) for name, seen in truth.items()}
        row["order"] = {name: None if math.isnan(one) else one for name, one in order.items()}
        own = row["order"][theory.target]
        row["orders"] = None if own is None else -own if theory.falls else own
        row["seconds"] = self.seconds[theory.name]
        return row

    def _column(self, value: Callable[[dict[str, Any]], float]) -> Tensor:
        return torch.tensor([value(head) for head in self.heads], dtype=torch.float64)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "tokens": self.tokens,
            "blocks": self.blocks,
            "measured": MEASURED,
            "theories": self.rows(),
            "heads": self.heads,
            "skipped": self.skipped,
        }


def theories(
    model: nn.Module,
    blocks: Tensor,
    config: RealityConfig | None = None,
    *,
    squares: int = 24,
    report: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> League:
    """Compute everybody's quantities on the first part of the blocks, and judge them on the rest.

    Whole attention matrices are taken of `squares` blocks of either part; all else is what
    `config.query` does, and what `explain` skips is skipped.
    """
    config = replace(config or RealityConfig(), exact=False)
    halves = Halves.of(model, blocks, config)
    few = min(squares, halves.used, len(halves.every) - halves.used)
    recorder = _Squares(model, halves.attentions)
    both = torch.cat([halves.every[:few], halves.every[-few:]])
    for done in recorder.run(both, batch=config.batch):
        report("model", done, len(both))
    heads: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    skipped = dict(halves.skipped)
    for sample in halves.samples(model, config.query, skipped, report):
        name = sample.attention.layout.name
        parts = [recorder.mean(name, part) for part in (slice(few), slice(-few, None))]
        with one_thread(), torch.no_grad():
            heads += _judged(sample, halves.used, parts, config, seconds)
        report("layers", len(heads), len(halves.attentions))
    if not heads:
        raise LocaterError(
            f"no head can be judged: {next(iter(skipped.values()), 'none was seen')}.",
            hint="use fewer tokens, or measure alone, with `locater probe`.",
        )
    return League(
        tokens=blocks.shape[1], blocks=len(halves.every) - halves.used, heads=heads,
        seconds=seconds, skipped=skipped,
    )  # fmt: skip


def _judged(
    sample: AttentionSamples,
    used: int,
    squares: list[dict[str, Tensor]],
    config: RealityConfig,
    seconds: dict[str, float],
) -> list[dict[str, Any]]:
    """The heads of one attention: what they did, and every theory's value."""
    layout = sample.attention.layout
    own, held_out = sample.logits[:used].double(), sample.logits[used:].double()
    form, process, moments = estimated(sample)
    generator = torch.Generator().manual_seed(config.seed)
    ours = predicted(form, process, moments, measure(own), config, generator)
    facts = Facts(form=form, inputs=sample.inputs, logits=own, squares=squares[0], ours=ours)
    values: dict[str, list[float]] = {}
    for theory, step in _EVERY.items():
        if step and step not in facts.ours:
            continue
        start = time.perf_counter()
        values[theory.name] = theory.formula(facts).double().tolist()
        taken = time.perf_counter() - start
        if step not in ("", "copy"):
            taken += facts.ours[step].seconds
        seconds[theory.name] = seconds.get(theory.name, 0.0) + taken
    truth = measured(held_out) | {"rank": squares[1]["rank"]}
    return [
        {"name": layout.name, "layer": layout.layer, "head": head}
        | {name: truth[name][head].item() for name in MEASURED}
        | {"theories": {name: value[head] for name, value in values.items()}}
        for head in range(own.shape[1])
    ]


def measured(logits: Float[Tensor, "blocks heads tokens"]) -> dict[str, Float[Tensor, " heads"]]:
    """What the last queries did, but for the rank of tokens."""
    attention = torch.softmax(logits, -1)
    largest = logits.amax(-1) - logits.mean(-1)
    return {
        "entropy": attention_entropy(attention).mean(0),
        "sharpness": attention.amax(-1).mean(0),
        "sink": attention[..., 0].mean(0),
        "rho": measure(logits).profile.rho.mean(-1),
        "largest": largest.mean(0),
    }
