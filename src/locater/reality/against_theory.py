"""Theory against reality: what a head's weights and its tokens' moments predict, and what it does.

Moments are estimated on one part of a text and attention is measured on another, with the model's
own logits.  Predictions go from the paper's printed formula to the exact law with full moments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.core.bounds import entropy_lower_bound
from locater.core.diagnosis import diagnose
from locater.core.form import QKForm
from locater.core.gaussianity import Gaussianity, gaussianity, random_projections
from locater.core.process import TokenProcess
from locater.core.score import HeadMoments, SampledHeads, normal_between
from locater.core.theory import (
    Profile,
    attention_entropy,
    linearized_softmax,
    predicted_attention,
    propagation,
)
from locater.engines import one_thread
from locater.errors import ConfigError, InputError, LocaterError
from locater.models.live import LiveAttention, find_attention
from locater.models.names import plain_name
from locater.probe.rows import Logits
from locater.probe.watch import Place, Watch
from locater.reality.records import LayerReality, Measured, Prediction, Reality


@dataclass(eq=False)
class AttentionSamples:
    """One attention over all blocks; inputs are kept of the first blocks only."""

    attention: LiveAttention
    inputs: Float[Tensor, "kept tokens model"]
    logits: Float[Tensor, "blocks heads keys"]
    """Of the last query of every block, as the model computed them."""


@dataclass(eq=False)
class _Seen:
    """Filled in place: thousands of pieces between a model's own tensors would tear memory up."""

    inputs: Tensor | None = None
    logits: Tensor | None = None
    begun: set[int] = field(default_factory=set)

    def put(self, done: int, blocks: int, keep: int, tokens: Tensor, rows: Tensor) -> None:
        """Store a batch that begins at block `done`."""
        if self.logits is None or self.inputs is None:
            self.logits = torch.empty(blocks, *rows.shape[1:], dtype=rows.dtype)
            self.inputs = torch.empty(keep, *tokens.shape[1:])
        if rows.shape[1:] != self.logits.shape[1:] or len(rows) != len(tokens):
            raise InputError(
                f"logits of {tuple(rows.shape)} follow logits of {tuple(self.logits.shape)}.",
                hint="every block must run through each attention once, with all its tokens.",
            )
        if done in self.begun:
            raise InputError(
                "an attention runs several times in a pass (layers that share their weights).",
                hint="theory is held against each layer's own tokens; use Probe to measure.",
            )
        self.begun.add(done)
        self.logits[done : done + len(rows)] = rows
        self.inputs[done : done + len(tokens)] = tokens[: max(keep - done, 0)]


def collect(
    model: nn.Module,
    attentions: list[LiveAttention],
    blocks: Tensor,
    *,
    keep: int,
    batch: int = 16,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[AttentionSamples]:
    """Run the model on blocks (blocks × tokens, or tokens' vectors) and watch its attentions.

    Inputs of the first `keep` blocks are held, `keep · tokens · model` floats per attention; of all
    blocks the logits are.  Model outputs are not used: give the part without a head.
    """
    places = {one.module: Place.of(one.layout) for one in attentions if one.module is not None}
    names = {module: plain_name(path) for path, module in model.named_modules()}
    seen = {place.name: _Seen() for place in places.values()}
    done = 0

    def heard(place: Place, logits: Logits) -> Tensor:
        last = torch.tensor([logits.shape[2] - 1], device=logits.device)
        rows, visible = logits.rows(slice(None), last)
        if visible is not None and not bool(visible.expand(rows.shape).all()):
            raise InputError(
                f"the last query of {place.name} does not see every key.",
                hint="a sliding window or padding hides some; use fewer tokens.",
            )
        return rows[:, :, 0].cpu()

    def left(place: Place, tokens: Tensor, rows: list[Any]) -> None:
        if place.name not in seen:
            return
        seen[place.name].put(done, len(blocks), keep, tokens.float().cpu(), torch.cat(rows))

    was_training = model.training
    model.eval()
    try:
        for part in blocks.split(batch):
            watch = Watch(places, names, heard, left)
            with torch.inference_mode():
                watch.start(nn.Identity())  # the model's own hooks have yet to run
                try:
                    model(part)
                except (RuntimeError, IndexError, ValueError, TypeError) as error:
                    reason = str(error).strip().splitlines() or [type(error).__name__]
                    raise LocaterError(
                        f"the model fails on blocks of {part.shape[1]} tokens: {reason[0][:200]}",
                        hint="use fewer tokens than the model has positions, and a model that "
                        "takes token ids alone.",
                    ) from error
                finally:
                    watch.stop()
            done += len(part)
            report(done, len(blocks))
    finally:
        model.train(was_training)
    missing = [name for name, one in seen.items() if one.logits is None]
    if missing:
        raise LocaterError(
            f"{missing[0]} did nothing that could be seen.",
            hint="of transformers load attn_implementation='sdpa' or 'eager'.",
        )
    return [
        AttentionSamples(one, mine.inputs, mine.logits)
        for one in attentions
        if (mine := seen.get(one.layout.name)) and mine.inputs is not None
        if mine.logits is not None
    ]


@dataclass(frozen=True, kw_only=True)
class RealityConfig:
    """How to hold the theory against a model."""

    estimate: float = 0.5
    """Share of the blocks, from the front of the text, that the moments are estimated on."""
    estimate_blocks: int | None = None
    """Use no more than this many of them; attention is measured on the same blocks as without."""
    draws: int = 1000
    """Rows of logits drawn for a predicted entropy."""
    exact: bool = True
    """Also invert the exact law of the score, which takes most of the time."""
    batch: int = 16
    layers: str | None = None
    """A regular expression that selects attentions by name."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.estimate < 1 or self.draws < 2 or self.batch < 1:
            raise ConfigError(
                f"estimate={self.estimate}, draws={self.draws}, batch={self.batch} make no sense.",
                hint="estimate lies between 0 and 1; draws is 2 or more, batch 1 or more.",
            )
        if self.estimate_blocks is not None and self.estimate_blocks < 8:
            raise ConfigError(
                f"estimate_blocks must be 8 or more, got {self.estimate_blocks}.",
                hint="covariances of a head need hundreds of blocks.",
            )


def against_theory(
    model: nn.Module,
    blocks: Tensor,
    config: RealityConfig | None = None,
    *,
    other: Tensor | None = None,
    report: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Reality:
    """Predict every head's attention from one part of the blocks and measure it on the rest.

    `blocks` is what the model takes: ids (blocks × tokens) in the order of the text, or vectors.
    The first share is for moments only, the rest for measurement only.  With `other` blocks, from
    another text, attention is measured on those.
    """
    config = config or RealityConfig()
    split = round(config.estimate * len(blocks))
    used = split if config.estimate_blocks is None else min(split, config.estimate_blocks)
    rest = blocks[split:] if other is None else other
    if used < 8 or len(rest) < 8:
        raise LocaterError(
            f"{len(blocks)} blocks leave {used} to estimate on and {len(rest)} to measure.",
            hint="give a longer text, or shorter blocks: hundreds of each are needed.",
        )
    found = [
        one
        for one in find_attention(model, layers=config.layers)
        if one.layout.kind == "self" and one.module is not None
    ]
    skipped = {
        one.layout.name: "queries and keys are normalized: no fixed W_QK exists"
        for one in found
        if one.layout.qk_norm
    }
    readable = [one for one in found if one.layout.name not in skipped]
    if not readable:
        raise LocaterError(
            "no self-attention of the model has a fixed W_QK.",
            hint="for models with qk-norm measure alone, with Probe(model).",
        )
    samples = collect(
        model,
        readable,
        torch.cat([blocks[:used], rest]),
        keep=used,
        batch=config.batch,
        report=lambda done, total: report("model", done, total),
    )
    layers = []
    with one_thread():
        for place in range(len(samples)):
            layers.append(layer_against_theory(samples[place], config))
            samples[place].inputs = samples[place].inputs[:0]  # free it: layers add up to gigabytes
            report("layers", place + 1, len(samples))
    return Reality(layers, used, len(rest), blocks.shape[1], skipped)


@torch.no_grad()
def layer_against_theory(samples: AttentionSamples, config: RealityConfig) -> LayerReality:
    """One attention: estimate, predict, compare."""
    layout, inputs = samples.attention.layout, samples.inputs
    used, tokens = inputs.shape[:2]
    generator = torch.Generator().manual_seed(config.seed)
    form = samples.attention.form(distances=tokens).to(torch.float64, torch.device("cpu"))
    process = TokenProcess.from_samples(inputs, fit="traces")
    heads = SampledHeads.of(form, inputs)
    own, held_out = samples.logits[:used].double(), samples.logits[used:].double()
    predictions = {
        name: _timed(make) for name, make in _predictions(form, process, heads, config, generator)
    }
    return LayerReality(
        name=layout.name,
        layer=layout.layer,
        explained=math.nan if process.explained is None else process.explained,
        measured=measure(held_out, f"{layout.name}, measured"),
        in_sample=measure(own, f"{layout.name}, where estimated"),
        predictions=predictions,
        logit_gap=_logit_gap(heads.logits(), own),
        diagnosis=diagnose(form, process),
        features=_features(heads, inputs, generator),
        caveats=layout.caveats,
    )


def measured_processes(
    model: nn.Module,
    blocks: Tensor,
    *,
    memory: int = 1 << 30,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, TokenProcess]:
    """The tokens that enter every self-attention of a model, by its name: means, K and Σ.

    Layers whose inputs together fit into `memory` bytes are taken in one pass of the model.
    """
    found = [
        one for one in find_attention(model) if one.layout.kind == "self" and one.module is not None
    ]
    if not found or len(blocks) < 8:
        raise LocaterError(
            f"{len(found)} self-attentions and {len(blocks)} blocks of text give no token process.",
            hint="give a model with self-attention and a longer text, or fewer --tokens.",
        )
    size = 4 * len(blocks) * blocks.shape[1] * max(one.layout.model for one in found)
    some = max(1, memory // size)
    processes: dict[str, TokenProcess] = {}
    for start in range(0, len(found), some):
        samples = collect(model, found[start : start + some], blocks, keep=len(blocks), batch=8)
        with one_thread():
            for one in samples:
                processes[one.attention.layout.name] = TokenProcess.from_samples(
                    one.inputs, fit="traces"
                )
                report(len(processes), len(found))
    return processes


def measure(logits: Float[Tensor, "blocks heads tokens"], label: str = "") -> Measured:
    """What the last query of each block did, from the model's own logits."""
    blocks, _, tokens = logits.shape
    score, attention = linearized_softmax(logits), torch.softmax(logits, -1)
    rho = ((score >= 0) & (score <= 1)).double().mean(0)
    entropy = attention_entropy(attention)
    centered = logits - logits.mean(-1, keepdim=True)
    norm = centered.norm(dim=-1)
    spread = centered - centered.mean(0)
    variance = spread.square().mean(0)
    safe = variance.clamp_min(1e-300)
    error = (rho * (1 - rho) / blocks).sqrt()
    return Measured(
        profile=Profile.by_token(rho, label, source="measured", standard_error=error),
        entropy=entropy.mean(0),
        entropy_error=entropy.std(0) / math.sqrt(blocks),
        attention=attention.mean(0),
        logit_mean=centered.mean(0),
        logit_variance=variance * blocks / (blocks - 1),
        logit_kurtosis=(spread.pow(4).mean(0) / safe.square() - 3).mean(-1),
        entropy_bound=entropy_lower_bound(norm, tokens).mean(0),
        gaussian_rho=normal_between(score.mean(0), score.var(0)),
    )


Make = Callable[[], Prediction]


def _predictions(
    form: QKForm,
    process: TokenProcess,
    heads: SampledHeads,
    config: RealityConfig,
    generator: torch.Generator,
) -> Iterator[tuple[str, Make]]:
    """From the paper's formula to full moments, each with one more ingredient than the last."""
    walk = TokenProcess.random_walk(process.tokens)
    bare = QKForm(form.query, form.key, form.temperature)
    still = replace(form, rotary=None)
    yield "printed", lambda: Prediction(propagation(bare, walk, method="as_printed"))
    yield "walk", lambda: Prediction(propagation(bare, walk))
    yield "kernel", lambda: _gaussian(bare, replace(process, mean=None), config, generator)
    yield "means", lambda: _gaussian(still, process, config, generator)
    if form.rotary is not None:
        yield "rotary", lambda: _gaussian(form, process, config, generator)
    if config.exact:
        yield "exact", lambda: _exact(form, process, config, generator)
        yield "full_gaussian", lambda: _full(heads, config, None, exact=False)
    yield "full", lambda: _full(heads, config, generator, exact=config.exact)
    yield "given_query", lambda: _given_query(heads, config, generator)


def _timed(make: Make) -> Prediction:
    start = time.perf_counter()
    prediction = make()
    return replace(prediction, seconds=time.perf_counter() - start)


def _gaussian(
    form: QKForm, process: TokenProcess, config: RealityConfig, generator: torch.Generator
) -> Prediction:
    mean, variance = HeadMoments.of(form, process).score().moments()
    drawn = predicted_attention(form, process, draws=config.draws, generator=generator)
    tokens = process.tokens
    return Prediction(
        propagation(form, process, method="gaussian"),
        entropy=drawn.entropy,
        attention=drawn.attention,
        logit_mean=tokens * mean - 1,
        logit_variance=tokens**2 * variance,
    )


def _exact(
    form: QKForm, process: TokenProcess, config: RealityConfig, generator: torch.Generator
) -> Prediction:
    drawn = predicted_attention(form, process, law="exact", draws=config.draws, generator=generator)
    profile = propagation(form, process)
    return Prediction(profile, entropy=drawn.entropy, attention=drawn.attention)


def _full(
    heads: SampledHeads, config: RealityConfig, generator: torch.Generator | None, *, exact: bool
) -> Prediction:
    """With the moments of queries and keys themselves; entropy is drawn with a generator."""
    score, tokens = heads.score(), heads.tokens
    mean, variance = score.moments()
    rho = score.rho("exact" if exact else "gaussian")
    profile = Profile.by_token(rho, "full moments")
    prediction = Prediction(
        profile, logit_mean=tokens * mean - 1, logit_variance=tokens**2 * variance
    )
    if generator is None:
        return prediction
    attention = torch.softmax(heads.sample_logits(config.draws, generator), -1)
    entropy = attention_entropy(attention).mean(0)
    return replace(prediction, entropy=entropy, attention=attention.mean(0))


def _given_query(
    heads: SampledHeads, config: RealityConfig, generator: torch.Generator
) -> Prediction:
    """With queries as they were sampled, and keys that are Gaussian given the query."""
    profile = Profile.by_token(heads.rho_given_query(), "given the query")
    logits = heads.sample_logits(config.draws, generator, given_query=True)
    attention = torch.softmax(logits, -1)
    entropy = attention_entropy(attention).mean(0)
    return Prediction(profile, entropy=entropy, attention=attention.mean(0))


def _logit_gap(
    ours: Float[Tensor, "blocks heads tokens"], own: Float[Tensor, "blocks heads tokens"]
) -> float:
    """Largest difference between the form's logits and the model's, relative to their spread."""
    first, second = (part - part.mean(-1, keepdim=True) for part in (ours, own))
    return ((first - second).abs().amax() / second.std().clamp_min(1e-12)).item()


def _features(
    heads: SampledHeads, inputs: Float[Tensor, "blocks tokens model"], generator: torch.Generator
) -> dict[str, Gaussianity]:
    """Are queries, keys and tokens Gaussian: by dimension, and along random directions?"""
    middle = inputs.shape[1] // 2
    queries = heads.query.movedim(-2, 0).flatten(1)
    keys = heads.key[..., middle, :].movedim(-2, 0).flatten(1)
    tokens = inputs[:, middle].double()
    return {
        "queries": gaussianity(queries),
        "keys": gaussianity(keys),
        "tokens": gaussianity(tokens),
        "token projections": gaussianity(random_projections(tokens, 64, generator)),
    }
