"""Do it to the running model: predicted against measured changes; results/interventions/NAME.json.

python benchmarks/study_interventions.py MODEL TEXT --name rxnfp --layers 0 4 8 [--tuned OTHER]
python benchmarks/study_interventions.py demo TEXT --name demo --layers 0 1 2 3 --adapter CODE
python benchmarks/study_interventions.py --page docs/interventions.md
Every change is made to one attention of the model, which is cut off behind it, and its attention is
measured on the second half of the text.  Predictions know the first half: `moments` is what-if
(K ⊗ Σ of a head's queries and keys), `full` and `clusters` are the predictions of those names,
`resample` sends the stored tokens of the first half through the changed weights.  Resumable.
With --adapter the model is first given a LoRA that was trained on another text, which is then
dropped at the one attention.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from studies import asked_blocks, has_page, stored, study_parser
from studies import load as load
from torch import Tensor, nn

from locater.control.trial import next_token_loss
from locater.core.form import QKForm
from locater.core.process import TokenProcess
from locater.core.score import HeadMoments, LogitDraws, SampledHeads
from locater.core.theory import attention_entropy
from locater.engines import one_thread
from locater.files import write_file
from locater.models.live import LiveAttention, find_attention
from locater.models.loading import load_model, read_text, text_blocks
from locater.models.positions import stretched
from locater.probe.samples import collect, logit_gap
from locater.reality.predictions import KeyClusters
from locater.reality.what_if import Change, LayerMoments
from locater.report.tables import markdown_table

PREDICTIONS = ("moments", "full", "clusters", "resample")
NAMES = {"query": ("query", "q_proj"), "key": ("key", "k_proj")}


@dataclass(frozen=True)
class Done:
    """One change: what it does to the model, to a form, and to stored queries and keys."""

    change: Change = field(default_factory=Change)
    white: bool = False
    swap: bool = False


def changes(form: QKForm, swapped: str | None) -> dict[str, Done]:
    """Those that mean something for this attention."""
    found = {f"W_QK × {scale:g}": Done(Change(scale=scale)) for scale in (0.5, 0.8, 1.25, 2.0)}
    found["λ × 1.5"] = Done(Change(temperature=1.5))
    if form.query_bias is not None:
        found["no query bias"] = Done(Change(query_bias=False))
    found["keys centred"] = Done(Change(centered_keys=True))
    found["tokens whitened"] = Done(white=True)
    if form.rotary is not None:
        for kind in ("off", "base:1e6", "linear:4", "ntk:4", "yarn:4"):
            found[f"rotation {kind}"] = Done(Change(rope_scaling=kind))
    if swapped:
        found[swapped] = Done(swap=True)
    return found


def main() -> None:
    parser = study_parser(__doc__, "interventions", blocks=500)
    parser.add_argument("--layers", type=int, nargs="*", default=[0])
    parser.add_argument("--tuned")
    parser.add_argument("--adapter", type=Path, help="the text of a LoRA to train, then to drop")
    parser.add_argument("--steps", type=int, default=150, help="of the adapter's training")
    given = parser.parse_args()
    if has_page(given, table):
        return
    path, result = stored(given, "layers")
    learned = adapted(given) if given.adapter else None
    swapped = "LoRA dropped" if given.adapter else "fine-tuned weights" if given.tuned else None
    for layer in given.layers:
        if str(layer) in result["layers"]:
            continue
        model, tokenizer = load_model(given.model)
        tuned = load_model(given.tuned)[0] if given.tuned else None
        if learned is not None:
            model, tuned = deepcopy(learned), model
        blocks = asked_blocks(given, tokenizer)
        result["blocks"] = len(blocks)
        result["layers"][str(layer)] = study(model, tuned, blocks, layer, swapped)
        write_file(path, json.dumps(result) + "\n")
        print(given.name, layer, flush=True)


def study(
    model: nn.Module, tuned: nn.Module | None, blocks: Tensor, layer: int, swapped: str | None
) -> list[dict[str, Any]]:
    """All changes of one layer, head by head."""
    attention = find_attention(model)[layer]
    shorten(model, layer)
    attention = next(
        one for one in find_attention(model) if one.layout.name == attention.layout.name
    )
    other = None if tuned is None else find_attention(tuned)[layer]
    half = len(blocks) // 2
    (sample,) = collect(model, [attention], blocks, keep=len(blocks))
    before = sample.logits[half:].double()
    form = plain(attention, blocks.shape[1])
    context = getattr(model.config, "max_position_embeddings", 2048)
    rotary = attention.layout.rotary
    place = {"base": rotary.base if rotary else 10_000.0, "context": context}
    start = Setting(form, sample.inputs, half)
    rows: list[dict[str, Any]] = []
    with one_thread():
        first = start.predictions(Done(), None, place)
    for name, one in changes(form, swapped).items():
        with performed(attention, one, start, other, place):
            (after,) = collect(model, [attention], blocks[half:], keep=0)
        with one_thread():
            twin = start.after(one, other)
            found = start.predictions(one, twin, place)
            gap = logit_gap(start.logits(one, twin, place), after.logits.double())
        assert gap < 0.05, (name, gap)  # the form does what was done to the model
        print(layer, name, f"{gap:.4f}", flush=True)
        rows += compared(layer, name, first, found, before, after.logits.double())
    return rows


def adapted(given: Any, modules: Any = "all-linear", folder: Path | None = None) -> nn.Module:
    """The model with a LoRA of rank 8, trained on another text, kept in a folder, and merged."""
    import peft

    whole, tokenizer = load_model(given.model, head=True)
    blocks = text_blocks(tokenizer, read_text(given.adapter), tokens=64, blocks=800)
    generator = torch.Generator().manual_seed(0)
    torch.set_rng_state(generator.get_state())  # peft draws from torch's own
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=modules)
    learner: Any = peft.get_peft_model(whole, settings)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([one for one in learner.parameters() if one.requires_grad], 2e-3)
    for step in range(given.steps):
        loss = next_token_loss(
            learner, blocks[torch.randint(len(blocks), (8,), generator=generator)]
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print("adapter", step, f"{loss.item():.3f}", flush=True)
    if folder is not None:
        learner.save_pretrained(folder)
    merged: nn.Module = learner.merge_and_unload().model
    return merged.eval().requires_grad_(requires_grad=False)


def shorten(model: nn.Module, layer: int) -> None:
    """Take the layers behind this one away: they see what it does, it does not see them."""
    for module in model.modules():
        for name, part in list(module.named_children()):
            if isinstance(part, nn.ModuleList) and len(part) > layer + 1 and len(part) > 4:
                setattr(module, name, part[: layer + 1])
    for name in ("num_hidden_layers", "num_hidden_groups"):
        if hasattr(model.config, name):
            setattr(model.config, name, layer + 1)


def plain(attention: LiveAttention, tokens: int) -> QKForm:
    """The attention's form in float64."""
    return attention.form(distances=tokens).to(torch.float64, torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class Setting:
    """What is known before a change: the form, and the tokens of the first half."""

    form: QKForm
    inputs: Tensor
    half: int

    def whitening(self) -> tuple[Tensor, Tensor]:
        """A map of tokens about their mean that makes their covariance a multiple of I."""
        tokens = self.inputs[: self.half].double().flatten(0, 1)
        values, vectors = torch.linalg.eigh(tokens.T.cov())
        size = values.mean()
        root = (size / values.clamp_min(1e-3 * size)).sqrt()  # rare directions are not blown up
        return (vectors * root) @ vectors.T, tokens.mean(0)

    def after(self, done: Done, other: LiveAttention | None) -> QKForm:
        """The form after a change of its weights by tokens or by another model's."""
        if done.swap:
            assert other is not None
            return plain(other, self.inputs.shape[1])
        if not done.white:
            return self.form
        white, mean = self.whitening()
        parts: dict[str, Tensor] = {}
        for side in ("query", "key"):
            weight = getattr(self.form, side)
            bias = getattr(self.form, f"{side}_bias")
            moved = weight @ (mean - white @ mean)
            parts[side] = weight @ white
            parts[f"{side}_bias"] = moved if bias is None else bias + moved
        return replace(self.form, **parts)  # type: ignore[arg-type]

    def sampled(
        self, twin: QKForm, done: Done, place: dict[str, Any], blocks: slice
    ) -> SampledHeads:
        """Queries and keys of stored tokens as the changed attention makes them."""
        size, tokens = twin.query.shape[-2], self.inputs[blocks].double()
        eye = torch.eye(2 * size, dtype=torch.float64)
        sides = [torch.einsum("ntm,ahm->anth", tokens, side) for side in (twin.query, twin.key)]
        if done.change.centered_keys:
            known = torch.einsum("ntm,ahm->anth", self.inputs[: self.half].double(), twin.key).mean(
                1, keepdim=True
            )
            sides[1] = sides[1] - known
        heads = []
        for head, pair in enumerate(torch.cat(sides, -1)):
            form = replace(twin[head], query=eye[:size], key=eye[size:])
            form, _ = done.change.of(form, TokenProcess.independent(pair.shape[1]), **place)
            heads.append(SampledHeads.of(form, pair))
        shifts = None
        if heads[0].shift is not None:
            shifts = torch.stack([one.shift for one in heads])  # type: ignore[misc]
        query, key = (torch.stack([getattr(one, n) for one in heads]) for n in ("query", "key"))
        return SampledHeads(query, key, heads[0].temperature, shifts)

    def logits(self, done: Done, twin: QKForm, place: dict[str, Any]) -> Tensor:
        """Of the second half, to hold against the model's own."""
        return self.sampled(twin, done, place, slice(self.half, None)).logits()

    def predictions(
        self, done: Done, twin: QKForm | None, place: dict[str, Any], draws: int = 300
    ) -> dict[str, dict[str, Tensor]]:
        """Entropy, ρ and mean attention of every head, by every prediction."""
        twin = self.form if twin is None else twin
        heads = self.sampled(twin, done, place, slice(self.half))
        logits = {"resample": heads.logits().movedim(1, 0)}
        generator = torch.Generator().manual_seed(0)
        logits["full"] = heads.sample_logits(draws, generator).movedim(1, 0)
        rho = {"full": heads.score().rho("gaussian"), "resample": counted(logits["resample"])}
        clusters = [KeyClusters.of(head, 8, generator) for head in heads.each()]
        logits["clusters"] = torch.stack([one.rows(draws, generator) for one in clusters])
        rho["clusters"] = torch.stack([one.rho() for one in clusters])
        known = LayerMoments.of(twin, self.inputs[: self.half])
        drawn, gates = [], []
        for head in range(len(known)):
            form, process = done.change.of(*known.head(head), **place)
            moments = HeadMoments.of(form, process)
            rows = LogitDraws.of(process, draws, generator).rows(moments, generator)
            drawn.append(torch.cat(list(rows), 1)[0])
            gates.append(moments.rho("gaussian"))
        logits["moments"], rho["moments"] = torch.stack(drawn), torch.stack(gates)
        return {name: seen(rows, rho[name]) for name, rows in logits.items()}


def counted(logits: Tensor) -> Tensor:
    """ρ as rows of logits have it."""
    score = (1 + logits - logits.mean(-1, keepdim=True)) / logits.shape[-1]
    return ((score >= 0) & (score <= 1)).double().mean(1)


def seen(logits: Tensor, rho: Tensor) -> dict[str, Tensor]:
    """What rows of logits say of every head."""
    attention = torch.softmax(logits, -1)
    return {
        "entropy": attention_entropy(attention).mean(1),
        "rho": rho.mean(-1),
        "attention": attention.mean(1),
    }


def compared(
    layer: int, name: str, first: Any, found: Any, before: Tensor, after: Tensor
) -> list[dict[str, Any]]:
    """Predicted and measured changes of one layer's heads."""
    then, now = (logits.movedim(1, 0) for logits in (before, after))
    truth = [seen(logits, counted(logits)) for logits in (then, now)]
    each = [attention_entropy(torch.softmax(logits, -1)) for logits in (then, now)]
    error = (each[1] - each[0]).std(1) / math.sqrt(then.shape[1])
    rows = []
    for head in range(len(then)):
        row: dict[str, Any] = {
            "layer": layer, "head": head, "change": name,
            "entropy_before": truth[0]["entropy"][head].item(),
            "entropy_error": error[head].item(),
        }  # fmt: skip
        moved = {"measured": truth, **{one: [first[one], found[one]] for one in PREDICTIONS}}
        for source, (start, end) in moved.items():
            row[source] = {
                "entropy": (end["entropy"] - start["entropy"])[head].item(),
                "rho": (end["rho"] - start["rho"])[head].item(),
                "attention": (end["attention"] - start["attention"])[head],
            }
        real = row["measured"]["attention"]
        for source in moved:
            gap = row[source].pop("attention")
            row[source]["attention_off"] = (gap - real).abs().sum().item() / 2
            row[source]["attention_moved"] = gap.abs().sum().item() / 2
        rows.append(json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 4)))
    return rows


def linear(module: nn.Module, side: str) -> nn.Linear:
    """A projection of an attention, by the names of its family."""
    return next(getattr(module, name) for name in NAMES[side] if hasattr(module, name))


@contextmanager
def performed(
    attention: LiveAttention,
    done: Done,
    start: Setting,
    other: LiveAttention | None,
    place: dict[str, Any],
) -> Iterator[None]:
    """The change, made to the module itself, and taken back."""
    module = attention.module
    assert module is not None
    sides: Any = {side: linear(module, side) for side in NAMES}
    kept = {side: {n: p.clone() for n, p in sides[side].named_parameters()} for side in NAMES}
    scaling, handles, change = module.scaling, [], done.change
    added: list[nn.Linear] = []
    try:
        with torch.no_grad():
            for parameter in sides["query"].parameters():
                parameter.mul_(change.scale)
            module.scaling = scaling / change.temperature
            if not change.query_bias:
                sides["query"].bias.zero_()
            if change.centered_keys:
                mean = sides["key"](start.inputs[: start.half]).mean(0)
                handles.append(sides["key"].register_forward_hook(lambda m, a, out: out - mean))
            if done.white:
                white, middle = (part.float() for part in start.whitening())
                for side in sides.values():
                    moved = side.weight @ (middle - white @ middle)
                    if side.bias is None:
                        side.bias = nn.Parameter(torch.zeros(len(side.weight)))
                        added.append(side)
                    side.bias.add_(moved)
                    side.weight.copy_(side.weight @ white)
            if done.swap:
                assert other is not None and other.module is not None
                for side, target in sides.items():
                    target.load_state_dict(linear(other.module, side).state_dict())
            if change.rope_scaling:
                turn = rotated(attention, change.rope_scaling, place)
                handles.append(module.register_forward_pre_hook(turn, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for side in added:
            side.bias = None
        module.scaling = scaling
        with torch.no_grad():
            for side, parameters in kept.items():
                for name, value in parameters.items():
                    getattr(sides[side], name).copy_(value)


def rotated(attention: LiveAttention, words: str, place: dict[str, Any]) -> Callable[..., Any]:
    """A hook that turns one attention's queries and keys by other angles."""
    kind, _, factor = words.partition(":")
    frequencies, magnitude = plain(attention, 2).rotary.frequencies, 1.0  # type: ignore[union-attr]
    if kind != "off":
        frequencies, magnitude = stretched(
            frequencies, kind, float(factor), base=place["base"], original=place["context"]
        )
    else:
        frequencies = torch.zeros_like(frequencies)

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cos, _ = kwargs["position_embeddings"]
        angle = torch.arange(cos.shape[-2])[:, None] * torch.cat((frequencies, frequencies))
        pair = tuple((part * magnitude).to(cos)[None] for part in (angle.cos(), angle.sin()))
        return args, {**kwargs, "position_embeddings": pair}

    return hook


def _rows(study: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for layer in study["layers"].values() for row in layer]


def _clear(row: dict[str, Any]) -> bool:
    """Whether a change of entropy is more than the blocks' own noise."""
    change: float = abs(row["measured"]["entropy"])
    return change > max(4 * row["entropy_error"], 0.02)


def _figures(rows: list[dict[str, Any]], source: str) -> tuple[float, float, float]:
    """Correlation with the measured change of entropy, median relative and mean absolute error."""
    ours, real = (
        torch.tensor([row[one]["entropy"] for row in rows], dtype=torch.float64)
        for one in (source, "measured")
    )
    gap = (ours - real).abs()
    relative = (gap / real.abs())[torch.tensor([_clear(row) for row in rows])]
    return (
        torch.corrcoef(torch.stack((ours, real)))[0, 1].item(),
        relative.median().item(),
        gap.mean().item(),
    )


def table(studies: dict[str, Any], name: str) -> str:
    """One of the page's tables."""
    made = {"models": by_model, "changes": by_change, "others": others, "failures": failures}
    made["said"] = said
    return made[name](studies) + "\n"


def said(studies: dict[str, Any]) -> str:
    """The figures over all changes, in a sentence."""
    rows = [row for study in studies.values() for row in _rows(study)]
    found = [_figures(rows, source) for source in ("moments", "clusters", "resample")]
    together = [f"{correlation:.3f}".lstrip("0") for correlation, _, _ in found]
    off = [f"{relative:.2f}".lstrip("0") for _, relative, _ in found]
    return (
        f"Over all {len(rows)} changes of {len(studies)} models the predicted change of entropy "
        f"correlates with the measured one at {together[0]} from the moments of a "
        f"`locater what-if` file, at {together[1]} with clusters and at {together[2]} resampled. "
        f'The median error is {off[0]}, {off[1]} and {off[2]} of the change, where "nothing '
        'changes" is off by all of it.'
    )


def by_model(studies: dict[str, Any]) -> str:
    """Changes of entropy, over all changes of a model."""
    every = {**{name: _rows(one) for name, one in studies.items()}}
    every["all"] = [row for rows in every.values() for row in rows]
    lines = []
    for name, rows in every.items():
        heads = len({(row["layer"], row["head"]) for row in rows}) if name != "all" else sum(
            len({(row["layer"], row["head"]) for row in part}) for part in list(every.values())[:-1]
        )  # fmt: skip
        size = sum(abs(row["measured"]["entropy"]) for row in rows) / len(rows)
        cells = []
        for source in PREDICTIONS:
            correlation, relative, mean = _figures(rows, source)
            cells.append(f"{correlation:.3f}, {relative:.2f}, {mean:.3f}")
        lines.append([name, heads, len(rows), f"{size:.3f}", *cells])
    return markdown_table(lines, ["model", "heads", "changes", "nothing changes", *PREDICTIONS])


def by_change(studies: dict[str, Any]) -> str:
    """The same by what was done."""
    rows = [row for one in studies.values() for row in _rows(one)]
    lines = []
    for change in dict.fromkeys(row["change"] for row in rows):
        some = [row for row in rows if row["change"] == change]
        size = sum(abs(row["measured"]["entropy"]) for row in some) / len(some)
        cells = []
        for source in PREDICTIONS:
            correlation, relative, mean = _figures(some, source)
            cells.append(f"{correlation:.3f}, {relative:.2f}, {mean:.3f}")
        lines.append([change, len(some), f"{size:.3f}", *cells])
    return markdown_table(lines, ["done", "heads", "nothing changes", *PREDICTIONS])


def others(studies: dict[str, Any]) -> str:
    """Changes of mean ρ and of mean attention."""
    lines = []
    for name, study in studies.items():
        rows = _rows(study)
        for what, key in (("mean ρ", "rho"), ("mean attention", "attention_off")):
            cells = []
            for source in PREDICTIONS:
                if key == "rho":
                    gaps = [abs(row[source][key] - row["measured"][key]) for row in rows]
                else:
                    gaps = [row[source][key] for row in rows]
                cells.append(f"{sum(gaps) / len(gaps):.3f}")
            size = [
                abs(row["measured"]["rho" if key == "rho" else "attention_moved"]) for row in rows
            ]
            lines.append([name, what, f"{sum(size) / len(size):.3f}", *cells])
    return markdown_table(
        lines, ["model", "mean error of the change of", "nothing changes", *PREDICTIONS]
    )


def failures(studies: dict[str, Any]) -> str:
    """Heads whose change the moments miss by most, with what resampling makes of them."""
    rows = [{"model": name, **row} for name, one in studies.items() for row in _rows(one)]
    rows.sort(key=lambda row: -abs(row["full"]["entropy"] - row["measured"]["entropy"]))
    shown = {
        "model": "model", "layer.head": lambda row: f"{row['layer']}.{row['head']}",
        "done": "change", "entropy before": "entropy_before:.2f",
        "measured": lambda row: f"{row['measured']['entropy']:+.2f}",
        **{one: (lambda row, one=one: f"{row[one]['entropy']:+.2f}") for one in PREDICTIONS},
    }  # fmt: skip
    return markdown_table(rows[:12], shown)


if __name__ == "__main__":
    main()
