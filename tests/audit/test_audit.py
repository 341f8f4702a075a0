"""An audit's numbers are those of the dense definition, of the live model and of drawn tokens."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import threading
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.models.families import FAMILIES, built, shaken, watched
from torch import Tensor, nn

from locater import (
    QKForm,
    Rotary,
    TokenProcess,
    attention_entropy,
    predicted_attention,
    propagation,
)
from locater.audit import (
    Audit,
    AuditConfig,
    HeadRecord,
    audit_checkpoint,
    audit_model,
    audit_timeline,
)
from locater.audit.audit import AuditKeywords, Auditor, Layers, on_text
from locater.audit.draws import entropy_columns, null_of
from locater.audit.table import judge, stands_out
from locater.core.process import ProcessName
from locater.core.score import HeadMoments, LogitDraws
from locater.errors import ConfigError, InputError, LocaterError
from locater.files import DEMO
from locater.models.layout import AttentionLayout
from locater.models.live import discover, find_attention
from locater.models.loading import load_model, read_text, text_blocks
from locater.probe.probe import Probe

TINY = (
    "gpt2", "gpt_bigcode", "gptj", "gpt_neox", "opt", "bloom", "falcon, new", "llama", "mistral",
    "qwen2", "qwen3", "gemma", "gemma2", "phi3", "bert", "roberta", "distilbert", "modernbert",
    "vit", "clip", "t5", "bart", "whisper",
)  # fmt: skip
NORMED = (*TINY, "openai-gpt", "gpt_neo", "cohere", "stablelm", "olmo2", "siglip", "electra")
SPECTRAL = (
    "trace", "trace_of_square", "frobenius_squared", "mean", "variance", "spectral_norm",
    "stable_rank", "asymmetry", "nonnormality", "dispersion", "xi", "eta", "r",
)  # fmt: skip
ROUNDING = {"rel": 1e-9, "abs": 1e-9}


@cache
def live(name: str) -> nn.Module:
    return built(name)


MEASURED = {"measured_entropy", "measured_error", "logit_gap"}


def row_values(row: HeadRecord) -> dict[str, object]:
    """The numbers of a head's own; its distance from others multiplies their rounding."""
    others = {*MEASURED, "deviation"}
    return {
        name: value
        for name, value in row.to_dict().items()
        if not isinstance(value, str | tuple) and name not in others
    }


@pytest.mark.parametrize("name", TINY)
def test_a_saved_model_has_the_rows_of_the_live_one(name: str, tmp_path: Path) -> None:
    model = live(name)
    model.save_pretrained(tmp_path)
    stored, running = audit_checkpoint(tmp_path, tokens=16), audit_model(model, tokens=16)
    assert len(stored.rows) == len(running.rows) > 0
    for ours, theirs in zip(
        sorted(stored.rows, key=lambda row: (row.name, row.head)),
        sorted(running.rows, key=lambda row: (row.name, row.head)),
        strict=True,
    ):  # some families store under other names than they run
        assert (ours.part, ours.kv_head, ours.kind) == (theirs.part, theirs.kv_head, theirs.kind)
        assert row_values(ours) == pytest.approx(row_values(theirs), **ROUNDING)
        assert ours.rho == pytest.approx(theirs.rho, **ROUNDING)
        assert ours.status == theirs.status
        assert (ours.verdict, theirs.verdict) == ("not judged", "not judged")


@pytest.mark.parametrize("name", TINY)
def test_rows_are_the_statistics_of_the_dense_matrix(name: str) -> None:
    model = live(name)
    layers = Layers.of_model(model)
    rows = iter(audit_model(model, tokens=16).rows)
    for layout in layers.layouts:
        form = layers.form(layout, layers.tensors(layout))
        gain, _ = layout.gain(layers.tensors(layout))
        raw = layout.form(layers.tensors(layout)).matrix()
        if gain is not None:
            raw = gain[:, None] * raw * gain
            if layout.qk_norm:  # which undoes whatever length the gains give to queries and keys
                for side in (layout.query, layout.key):
                    weight = side.heads(layers.tensors(layout)[side.weight], layout.head_dim)
                    least = layout.head_dim * side.norm.eps
                    sizes = [
                        part.square().sum((-2, -1)) + least for part in (weight, weight * gain)
                    ]
                    ratio = (sizes[0] / sizes[1]).sqrt()
                    raw = raw * ratio.repeat_interleave(len(raw) // len(ratio))[:, None, None]
        torch.testing.assert_close(form.matrix(), raw)
        for dense in raw.detach():
            row = next(rows)
            rank = min(row.head_dim, row.model)
            values = torch.linalg.eigvals(dense)
            values = values[values.abs().argsort(descending=True)[:rank]]
            singular = torch.linalg.svdvals(dense)[:rank]
            size = dense.square().sum().item()
            expected = {
                "trace": dense.trace().item(),
                "trace_of_square": (dense @ dense).trace().item(),
                "frobenius_squared": size,
                "mean": dense.trace().item() / rank,
                "variance": (values - dense.trace() / rank).abs().square().mean().item(),
                "spectral_norm": singular[0].item(),
                "stable_rank": size / singular[0].item() ** 2,
                "asymmetry": ((dense - dense.mT) / 2).square().sum().item() / size,
                "nonnormality": size - values.abs().square().sum().item(),
                "dispersion": rank * size - dense.trace().item() ** 2,
                "xi": dense.trace().item() / math.sqrt(size),
                "eta": math.sqrt(size) / row.temperature,
                "r": dense.trace().item() / row.temperature,
            }
            assert set(expected) == set(SPECTRAL)
            found = {column: getattr(row, column) for column in expected}
            assert found == pytest.approx(expected, rel=1e-8, abs=1e-8 * size)
            # singular values go through Gram matrices: half the digits for the smallest
            assert row.singular_values == pytest.approx(singular.tolist(), abs=1e-7 * size**0.5)
            ours = torch.complex(*map(torch.tensor, (row.eigenvalues_real, row.eigenvalues_imag)))
            gap = (ours[:, None] - values.to(ours)).abs()
            assert gap.amin(0).max() < 1e-5 * singular[0]
    assert next(rows, None) is None


def norm_of(layout: AttentionLayout) -> str:
    """The module of the norm before an attention."""
    assert layout.before is not None and layout.before.gain is not None
    return layout.before.gain.removesuffix(".weight")


@pytest.mark.parametrize("name", NORMED)
def test_the_norm_before_an_attention_makes_what_it_reads(name: str) -> None:
    model = live(name)
    found, _ = discover(model)
    before = {one.layout.name: one.layout for one in found if one.layout.before is not None}
    outputs: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(norm_of(layout)).register_forward_hook(
            lambda module, inputs, output, at=at: outputs.__setitem__(at, output.detach())
        )
        for at, layout in before.items()
    ]
    with watched(found) as seen, torch.no_grad():
        model(**FAMILIES[name].inputs())
    for handle in handles:
        handle.remove()
    tensors = dict(model.named_parameters())
    for at, layout in before.items():
        read = seen[at].query_input
        assert read is not None
        assert torch.equal(outputs[at].reshape(read.shape), read)
        gain, shift = layout.gain(tensors)
        unit = (read - (0 if shift is None else shift)) / gain
        # LayerNorm's and RMSNorm's epsilon, at most 1e-5 here, is added to a variance near 1
        torch.testing.assert_close(
            unit.square().mean(-1), torch.ones(unit.shape[:-1]).to(unit), rtol=0, atol=1e-3
        )


TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "image_size": 8,
          "num_attention_heads": 4, "patch_size": 4}  # fmt: skip
ALONE = ("Nemotron", "VaultGemma", "Qwen3_5Text")
SEVERAL = {
    "Nemotron": TEXT,
    "VaultGemma": TEXT,
    "Qwen3_5Text": {**TEXT, "layer_types": ["full_attention"] * 2},
    "PaliGemma": {"text_config": {"model_type": "gemma", **TEXT},
                  "vision_config": {"model_type": "siglip_vision_model", **VISION}},
    "Gemma3": {"text_config": {"model_type": "gemma3_text", **TEXT},
               "vision_config": {"model_type": "siglip_vision_model", **VISION}},
}  # fmt: skip


@pytest.mark.parametrize("family", SEVERAL)
def test_gains_are_those_of_the_norms_in_every_tower(family: str) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**SEVERAL[family])
    model = shaken(transformers.AutoModel.from_config(config))
    layers = Layers.of_model(model)
    normed = [layout for layout in layers.layouts if layout.before is not None]
    assert len(normed) == (2 if family in ALONE else 4)  # SigLIP's pooling has none
    given = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = (given - given.mean()) / given.std(correction=0)
    for layout in normed:
        gain, shift = layout.gain(layers.tensors(layout))
        (own,) = (one for at, one in model.named_modules() if at.endswith(norm_of(layout)))
        with torch.no_grad():
            made = own(unit) - (0 if shift is None else shift)
        torch.testing.assert_close(unit * gain, made, rtol=1e-4, atol=1e-4)  # its epsilon


def test_norms_are_found_where_their_place_is_certain() -> None:
    known = {
        name: any(one.layout.before for one in discover(live(name))[0]) for name in TINY
    }  # fmt: skip
    assert [name for name in TINY if not known[name]] == ["opt", "t5", "bart", "whisper"]


def test_no_norm_is_known_of_a_type_that_was_not_put_to_the_test(tmp_path: Path) -> None:
    live("llama").save_pretrained(tmp_path)
    for model_type, known in (("nobody's", False), ("llama", True)):
        audit = audit_checkpoint(tmp_path, tokens=8, config={"model_type": model_type})
        assert any("no norm is known before 2" in one for one in audit.caveats) != known
        assert any("the gains of the norm" in one for one in audit.caveats) == known


def test_gains_can_be_left_out() -> None:
    model = live("llama")
    raw = find_attention(model)[0].form().spectrum()
    row = audit_model(model, tokens=16, gains=False).rows[0]
    assert row.trace == pytest.approx(raw.trace[0].item())
    assert row.trace != pytest.approx(audit_model(model, tokens=16).rows[0].trace)


def some_form(seed: int = 0, *, bias: bool = False, distances: int = 0) -> QKForm:
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 3, 4, 10, generator=generator, dtype=torch.float64) / 2
    form = QKForm(query, key, 2.0)
    if bias:
        form = dataclasses.replace(form, query_bias=torch.randn(3, 4, generator=generator).double())
    if distances:
        slope = torch.tensor([0.0, 0.1, 0.3], dtype=torch.float64)
        form = dataclasses.replace(form, distance_bias=-slope[:, None] * torch.arange(distances))
    return form


def some_process(tokens: int = 12, *, mean: bool = False, sigma: bool = False) -> TokenProcess:
    generator = torch.Generator().manual_seed(7)
    root = torch.randn(10, 10, generator=generator, dtype=torch.float64) / 3
    covariance = root @ root.mT + torch.eye(10, dtype=torch.float64) if sigma else None
    means = torch.randn(tokens, 10, generator=generator, dtype=torch.float64) if mean else None
    kernel = TokenProcess.named("unit-walk", tokens).kernel
    return TokenProcess(kernel, covariance, means)


CASES = [
    (some_form(), some_process()),
    (some_form(bias=True), some_process()),
    (some_form(distances=12), some_process()),
    (some_form(bias=True, distances=12), some_process(mean=True, sigma=True)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("method", ["gaussian", "exact"])
def test_rho_is_that_of_the_theory(case: int, method: str) -> None:
    form, process = CASES[case]
    spectrum = form.spectrum(process.covariance, share=1)
    ours = HeadMoments.of(form, process, spectrum=spectrum).rho(method)  # type: ignore[arg-type]
    theirs = propagation(form, process, method=method)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs.rho, rtol=0, atol=1e-9)


Z_LIMIT = NormalDist().inv_cdf(1 - 1e-6 / (2 * 12))  # 1 false alarm in 10⁶, 4 cases of 3 heads


@pytest.mark.statistical
@pytest.mark.parametrize("case", range(len(CASES)))
def test_entropy_is_that_of_drawn_tokens(case: int) -> None:
    form, process = CASES[case]
    draws = LogitDraws.of(process, 4000, torch.Generator().manual_seed(0))
    columns = entropy_columns(draws, HeadMoments.of(form, process))
    entropy, error, bound, _ = columns.values()
    tokens = process.sample(4000, model=10, generator=torch.Generator().manual_seed(3))
    query = tokens[:, None, -1:] @ form.query.mT
    query = query if form.query_bias is None else query + form.query_bias[:, None]
    logits = (query @ (tokens[:, None] @ form.key.mT).mT)[..., 0, :] / form.temperature
    if form.distance_bias is not None:
        logits = logits + form.distance_bias[:, :12].flip(-1)
    sample = attention_entropy(logits.softmax(-1))
    deviation = (error.square() + sample.var(0) / len(sample)).sqrt()
    assert ((entropy - sample.mean(0)).abs() < Z_LIMIT * deviation).all()
    assert (bound <= entropy).all() and (bound > 0).all()
    assert (deviation < 0.05).all()  # the resolution, in nats
    # a twin: tokens of twice the size have another entropy
    doubled = dataclasses.replace(form, temperature=form.temperature / 2)
    louder = entropy_columns(draws, HeadMoments.of(doubled, process))["entropy"]
    assert ((louder - sample.mean(0)).abs() > Z_LIMIT * deviation).any()


def test_cross_attention_asks_with_tokens_of_its_own() -> None:
    form, process = CASES[0]
    rho = HeadMoments.of(form, process, is_cross=True).rho("gaussian")
    assert rho[:, 0].allclose(rho[:, -1])  # no token is the query's own
    self_rho = HeadMoments.of(form, process).rho("gaussian")
    assert not self_rho[:, 0].allclose(self_rho[:, -1])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_an_offset_turns_the_keys(layout: str) -> None:
    rotary = Rotary.from_base(4, base=100.0, layout=layout)  # type: ignore[arg-type]
    form = dataclasses.replace(some_form(), rotary=rotary)
    ask = rotary.turn(form.query.mT, rotary.phases(torch.tensor(8.0).double())).mT
    answer = rotary.turn(form.key.mT, rotary.phases(torch.tensor(5.0).double())).mT
    dense = ask.mT @ answer  # a query at 8 and a key at 5
    spectrum = form.at_offset(3).spectrum()
    trace = dense.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(spectrum.trace, trace)
    torch.testing.assert_close(spectrum.frobenius_squared, dense.square().sum((-2, -1)))
    torch.testing.assert_close(spectrum.singular_values, torch.linalg.svdvals(dense)[:, :4])
    assert not form.at_offset(0).trace().allclose(trace)


def test_keywords_are_the_fields_of_the_settings() -> None:
    fields = {field.name for field in dataclasses.fields(AuditConfig)}
    assert set(AuditKeywords.__annotations__) == fields
    model = nn.TransformerEncoderLayer(8, 2)
    settings = AuditConfig(tokens=16, process="independent")
    assert audit_model(model, settings) == audit_model(model, tokens=16, process="independent")
    assert audit_model(model, settings, tokens=8).tokens == 8


def test_shared_keys_are_multiplied_once_and_count_for_each_head() -> None:
    form = some_form()
    shared = QKForm(
        torch.cat((form.query, form.query * 2)), form.key.repeat_interleave(2, 0), form.temperature
    )
    ours = shared.spectrum(share=2)
    torch.testing.assert_close(ours.frobenius_squared, shared.frobenius_squared())
    torch.testing.assert_close(ours.trace_of_square, shared.trace_of_square())
    torch.testing.assert_close(ours.trace, shared.trace())


@pytest.mark.statistical
def test_the_null_of_the_trace_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 20_000, 4, 6, generator=generator, dtype=torch.float64)
    query, key = query * 0.3, key * 2
    grams = QKForm(query, key, 1.0).spectrum()
    predicted = (0.09 * 24) * (4 * 24) / 24  # E‖Q‖² E‖K‖² / (head · model)
    # Var(tr²)/n with E tr⁴ from the sample; 4.9 standard errors is 1 in 10⁶
    squares = grams.trace.square()
    error = squares.std().item() / math.sqrt(len(squares))
    assert abs(squares.mean().item() - predicted) < 4.9 * error < 0.1 * predicted
    frobenius = grams.frobenius_squared
    expected = (0.09 * 24) * (4 * 24) / 4
    error = frobenius.std().item() / math.sqrt(len(frobenius))
    assert abs(frobenius.mean().item() - expected) < 4.9 * error < 0.1 * expected


@pytest.mark.statistical
@pytest.mark.parametrize(("head", "model"), [(4, 6), (8, 64), (6, 4)])
def test_the_null_of_spread_and_norm_is_that_of_drawn_factors(head: int, model: int) -> None:
    null = null_of(head, model, draws=4000)
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 4000, head, model, generator=generator, dtype=torch.float64)
    query, key = (part / math.sqrt(head * model) for part in (query, key))
    spectrum = QKForm(query, key, 1.0).spectrum()
    for sample, mean, deviation in (
        (spectrum.variance.sqrt(), null.spread, null.spread_deviation),
        (spectrum.spectral_norm, null.norm, null.norm_deviation),
    ):
        error = math.sqrt((sample.var().item() + deviation**2) / 4000)
        assert abs(sample.mean().item() - mean) < 5.3 * error < 0.1 * mean
        assert sample.std().item() == pytest.approx(deviation, rel=0.15)


def test_a_fresh_model_looks_like_the_null_and_a_bent_one_does_not() -> None:
    from transformers import GPT2Config, GPT2Model

    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = GPT2Model(GPT2Config(n_embd=128, n_head=8, n_layer=8, vocab_size=16))
    audit = audit_model(model, tokens=32)
    assert len(audit.rows) == 64
    for column, deviation in (("trace_z", 1.0), ("spread_z", 1.2), ("norm_z", 1.2)):
        values = torch.tensor([getattr(row, column) for row in audit.rows])
        # mean 0 and deviation 1 over 64 heads; the null itself has 48 draws
        assert abs(values.mean().item()) < 5 * deviation * math.sqrt(1 / 64 + 1 / 48)
        assert 0.6 < values.std().item() < 1.6
    with torch.no_grad():  # keys that look at the queries' own directions
        weight = model.h[0].attn.c_attn.weight
        weight[:, 128:256] += weight[:, :128]
    bent = [row for row in audit_model(model, tokens=32).rows if row.layer == 0]
    assert all(row.trace_z > 10 for row in bent)


class Reader(nn.Module):
    """One attention over given vectors, whose W_QK has a scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            drawn = torch.randn(96, 32, generator=generator)
            self.attention.in_proj_weight.copy_(drawn * scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.attention(tokens, tokens, tokens)[0]


@pytest.mark.parametrize(
    ("scale", "verdict"), [(0.3, "healthy"), (0.01, "uniform"), (3.0, "collapsed")]
)
def test_heads_are_judged_by_what_they_do(scale: float, verdict: str) -> None:
    model, blocks = (
        Reader(scale),
        torch.randn(32, 12, 32, generator=torch.Generator().manual_seed(1)),
    )
    audit = audit_model(model, blocks=blocks)
    assert {row.verdict for row in audit.rows} == {verdict}
    queries, keys = (
        (blocks @ part.detach().mT).unflatten(-1, (4, 8)).transpose(1, 2)
        for part in model.attention.in_proj_weight.chunk(3)[:2]
    )
    attention = (queries[:, :, -1:] @ keys.mT / math.sqrt(8)).softmax(-1)[:, :, 0].double()
    entropy = torch.special.entr(attention).sum(-1).mean(0).tolist()
    assert [row.measured_entropy for row in audit.rows] == pytest.approx(entropy, abs=1e-4)
    assert all(row.logit_gap is not None and row.logit_gap < 1e-4 for row in audit.rows)
    assert audit.head[0].startswith("verified: nn.MultiheadAttention")
    assert audit.head[1].startswith("measured on a text")
    unread = audit_model(model, tokens=12)
    assert {row.verdict for row in unread.rows} == {"not judged"}
    assert "no text was read" in unread.head[1]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "mistral", "gpt2"])
def test_norms_sinks_and_windows_are_held_against_the_model(name: str) -> None:
    blocks = torch.randint(8, (16, 8), generator=torch.Generator().manual_seed(0))
    audit = audit_model(built(name).eval(), blocks=blocks)
    assert all(row.logit_gap is not None and row.logit_gap < 1e-4 for row in audit.rows)
    assert "not judged" not in {row.verdict for row in audit.rows}


def test_a_form_that_is_not_the_model_s_is_not_judged() -> None:
    """Gemma 2 with its logits capped at 1: no form of W_QK gives those."""
    model = built("gemma2").eval()
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.q_proj.weight *= 30
            block.self_attn.attn_logit_softcapping = 1.0
    blocks = torch.randint(8, (16, 8), generator=torch.Generator().manual_seed(0))
    audit = audit_model(model, blocks=blocks)
    assert {row.verdict for row in audit.rows} == {"not judged"}
    assert all(row.logit_gap > 0.05 for row in audit.rows)  # type: ignore[operator]
    assert "it leaves something out" in audit.rows[0].reason
    assert any("known gap" in sentence and "not judged" in sentence for sentence in audit.head)
    assert Audit.from_json(audit.to_json()) == audit


@pytest.mark.parametrize(
    ("entropy", "gap", "status", "verdict"),
    [
        (0.6, 0.0, "unverified", "collapsed"),  # held against the model: its name does not matter
        (0.7, 0.0, "verified", "healthy"),
        (4.10, 0.0, "verified", "healthy"),
        (4.12, 0.0, "verified", "uniform"),
        (0.6, 0.051, "verified", "not judged"),
        (0.6, math.nan, "verified", "not judged"),
        (0.6, None, "unverified", "not judged"),
        (0.6, None, "partly", "not judged"),
        (0.6, None, "verified", "collapsed"),
        (None, None, "verified", "not judged"),
    ],
)
def test_verdicts_follow_their_rules(
    entropy: float | None, gap: float | None, status: str, verdict: str
) -> None:
    assert judge(entropy=entropy, tokens=64, logit_gap=gap, status=status)[0] == verdict


def test_one_head_unlike_the_others_is_named() -> None:
    from transformers import GPT2Config, GPT2Model

    model = shaken(GPT2Model(GPT2Config(n_embd=64, n_head=8, n_layer=4, vocab_size=8)))
    plain = audit_model(model, tokens=16)
    assert not any(stands_out(row) for row in plain.rows)
    with torch.no_grad():
        model.h[0].attn.c_attn.weight[:, :8] *= 100
    audit = audit_model(model, tokens=16)
    first = audit.worst_first()[0]
    assert [(row.layer, row.head) for row in audit.rows if stands_out(row)] == [(0, 0)]
    assert (first.layer, first.head) == (0, 0)
    column = [getattr(row, first.deviates_in) for row in audit.rows]
    values = torch.tensor(column, dtype=torch.float64)
    values = values.log() if first.deviates_in in ("eta", "stable_rank") else values
    middle = values.median() if len(values) % 2 else values.quantile(0.5)
    spread = 1.4826 * (values - middle).abs().quantile(0.5)
    assert first.deviation == pytest.approx(((values[0] - middle) / spread).item(), rel=1e-6)
    assert first.deviates_in in first.reason


def test_what_is_known_of_the_form_is_said_for_every_layer(tmp_path: Path) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert audit_checkpoint(tmp_path, tokens=8).head[0].startswith("verified: llama")
    for model_type, status in (("nobody's", "unverified"), (None, "unverified")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
        audit = audit_checkpoint(tmp_path, tokens=8)
        assert {row.status for row in audit.rows} == {status}
        assert audit.head[0].startswith("unverified: names only")


def test_a_zero_form_is_no_error() -> None:
    layer = nn.MultiheadAttention(8, 2, bias=False)
    nn.init.zeros_(layer.in_proj_weight)
    rows = audit_model(layer, tokens=8).rows
    assert rows[0].xi is None and rows[0].stable_rank is None
    assert rows[0].entropy == pytest.approx(math.log(8))
    Audit.from_json(audit_model(layer, tokens=8).to_json())


def test_measured_tokens_replace_the_assumed_ones() -> None:
    model = live("llama")
    name = find_attention(model)[0].layout.name
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(32, 32, generator=generator, dtype=torch.float64)
    process = TokenProcess.random_walk(16, covariance=root @ root.mT)
    audit = audit_model(model, tokens=16, processes={name: process})
    measured = [row for row in audit.rows if row.name == name]
    form = find_attention(model)[0].form()
    expected = form.spectrum(process.covariance)
    assert [row.trace for row in measured] == pytest.approx(expected.trace.tolist())
    assert "measured tokens of 1 layers" in audit.process
    with pytest.raises(ConfigError, match="different lengths: 16, 32"):
        audit_model(model, tokens=32, processes={name: process})


def test_without_eigenvalues_only_what_needs_them_is_missing() -> None:
    model = live("gpt2")
    with_them, without = (audit_model(model, tokens=16, eigenvalues=on) for on in (True, False))
    missing = {"variance", "spectral_norm", "stable_rank", "nonnormality"}
    missing |= {"spread_ratio", "spread_z", "norm_ratio", "norm_z"}
    for one, other in zip(with_them.rows, without.rows, strict=True):
        for column, value in row_values(other).items():
            assert (value is None) == (column in missing)
            assert value is None or value == getattr(one, column)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process": "dance"}, "unknown process 'dance'"),
        ({"offset": -1}, "offset must be zero or more"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"length": 3}, "unknown setting 'length'"),
        ({"tokens": 1}, "at least 2 tokens"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_settings_say_what_is_right(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        audit_model(nn.MultiheadAttention(8, 2), **settings)


def test_models_without_attention_say_what_was_seen(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match=r"no recipe finds queries and keys .* weight") as caught:
        audit_model(nn.Linear(4, 4))
    assert "Recipe(" in str(caught.value)
    save_file({"strange.<b>.thing": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(LocaterError, match=r"strange\.<b>\.thing"):
        audit_checkpoint(tmp_path)


def test_turned_keys_of_measured_tokens_have_each_their_own_distance() -> None:
    model = live("llama")
    first = find_attention(model)[0]
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(32, 32, generator=generator, dtype=torch.float64) / 3
    mean = torch.randn(16, 32, generator=generator, dtype=torch.float64)
    process = dataclasses.replace(
        TokenProcess.random_walk(16, covariance=root @ root.mT), mean=mean
    )
    audit = audit_model(model, tokens=16, processes={first.layout.name: process})
    rows = [row for row in audit.rows if row.name == first.layout.name]
    form = first.form(distances=16)
    assert form.rotary is not None
    exact = propagation(form, process, method="gaussian").rho
    torch.testing.assert_close(torch.tensor([row.rho for row in rows]).double(), exact)
    law = predicted_attention(form, process, law="exact", draws=4000)
    for row, entropy, error in zip(rows, law.entropy, law.entropy_error, strict=True):
        assert row.entropy is not None and row.entropy_error is not None
        deviation = math.hypot(row.entropy_error, error.item())
        assert abs(row.entropy - entropy.item()) < Z_LIMIT * deviation
    still = propagation(dataclasses.replace(form, rotary=None), process, method="gaussian").rho
    assert (still - exact).abs().max() > 0.05  # a twin: at one distance it is another head


def test_layers_that_the_config_counts_and_the_file_lacks_are_named(tmp_path: Path) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path)
    kept = {k: v for k, v in model.state_dict().items() if "layers.1." not in k}
    save_file(kept, tmp_path / "model.safetensors")
    audit = audit_checkpoint(tmp_path, tokens=8)
    (skipped,) = audit.skipped
    assert skipped.name == "layer 1" and "counts 2 layers" in skipped.reason
    assert "1 could not be read" in audit.summary


def test_a_shard_that_ends_within_a_layer_says_which_layers_it_lacks(tmp_path: Path) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    kept = {k: v for k, v in model.state_dict().items() if "layers.1." not in k}
    kept["layers.1.self_attn.q_proj.weight"] = model.layers[1].self_attn.q_proj.weight.detach()
    shard = tmp_path / "model-00001-of-00002.safetensors"
    save_file(kept, shard)
    audit = audit_checkpoint(shard, tokens=8)
    assert [one.name for one in audit.skipped] == ["layers.1.self_attn", "layers 2, 3"]
    assert "shard 1 of 2 alone: layers may lie in the others" in audit.caveats


@pytest.mark.parametrize(
    ("names", "config", "lost"),
    [
        ("h.0.attn", {"n_layers": 2}, ["layer 1"]),
        ("layers.0.self_attn", {"num_layers": 3}, ["layers 1, 2"]),
        ("encoder.layers.0.self_attn decoder.layers.0.self_attn decoder.layers.1.self_attn",
         {"num_hidden_layers": 1, "encoder_layers": 1, "decoder_layers": 3},
         ["layer 2 of decoder"]),
        ("vision_tower.layers.0.self_attn language_model.layers.1.self_attn",
         {"vision_config": {"num_hidden_layers": 2, "num_attention_heads": 2},
          "text_config": {"num_hidden_layers": 3, "num_attention_heads": 2}},
         ["layers 0, 2 of text", "layer 1 of vision"]),
        ("model.layers.0.self_attn mtp.layers.0.self_attn", {"num_hidden_layers": 1}, []),
        ("layers.0.self_attn", {}, []),
    ],
)  # fmt: skip
def test_layers_are_counted_where_a_config_says_how_many_there_are(
    names: str, config: dict[str, Any], lost: list[str], tmp_path: Path
) -> None:
    weights = {
        f"{name}.{side}_proj.weight": torch.eye(4) for name in names.split() for side in "qk"
    }
    save_file({k: v.clone() for k, v in weights.items()}, tmp_path / "model.safetensors")
    audit = audit_checkpoint(tmp_path, tokens=8, config={"num_attention_heads": 2} | config)
    assert [one.name for one in audit.skipped] == lost


def test_a_norm_of_nan_is_skipped_and_named(tmp_path: Path) -> None:
    model = built("llama")
    with torch.no_grad():
        model.layers[1].input_layernorm.weight[0] = math.nan
    audit = audit_model(model, tokens=8)
    (skipped,) = audit.skipped
    assert "norm before" in skipped.reason and {row.layer for row in audit.rows} == {0}


def test_a_layer_of_nan_is_skipped_and_named(tmp_path: Path) -> None:
    model = built("llama")
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight[0, 0] = math.nan
    model.save_pretrained(tmp_path)
    for audit in (audit_checkpoint(tmp_path, tokens=8), audit_model(model, tokens=8)):
        assert {row.layer for row in audit.rows} == {0}
        (skipped,) = audit.skipped
        assert skipped.name.endswith("layers.1.self_attn") and "NaN" in skipped.reason
        assert "1 could not be read" in audit.summary
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.weight.fill_(math.inf)
    with pytest.raises(InputError, match=r"no attention .* could be read.*NaN or infinite"):
        audit_model(model, tokens=8)


def test_tokens_of_a_text_are_the_probe_s_however_little_memory_there_is(samples: Path) -> None:
    model, tokenizer = load_model(samples / "model")
    blocks = text_blocks(tokenizer, read_text(samples / "text.txt"), tokens=8, blocks=64)
    with Probe(model) as probe:
        model(blocks)
    whole, sparing = (on_text(model, blocks, memory=size) for size in (1 << 30, 1))
    assert len(whole) == 2
    for name, seen in whole.items():
        process = seen.process
        expected = probe.process(name, fit="traces")
        for other in (expected, sparing[name].process):
            # float32 inputs that the model computes in batches of another size
            torch.testing.assert_close(process.kernel, other.kernel, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(process.mean, other.mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("process", ["unit-walk", "random-walk", "autoregressive", "independent"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom"])
def test_long_texts_have_the_rows_of_short_ones(
    name: str, process: ProcessName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No matrix of tokens is made beyond a length: here beyond 8 of 24."""
    model = live(name)
    dense = audit_model(model, tokens=24, process=process)
    monkeypatch.setattr("locater.audit.audit.DENSE_TOKENS", 8)
    long = audit_model(model, tokens=24, process=process)
    for one, other in zip(long.rows, dense.rows, strict=True):
        assert one.rho == pytest.approx(other.rho, rel=1e-9, abs=1e-12)
        assert one.regime == other.regime
        error = math.hypot(one.entropy_error, other.entropy_error)
        assert abs(one.entropy - other.entropy) < 5 * error + 1e-9


def test_thirty_thousand_tokens_can_be_assumed() -> None:
    audit = audit_model(nn.MultiheadAttention(16, 2), tokens=32_768)
    assert all(0 < row.entropy < math.log(32_768) for row in audit.rows)
    with pytest.raises(ConfigError, match="32,769 tokens are too many"):
        AuditConfig(tokens=32_769)
    with pytest.raises(ConfigError, match="8,193 tokens are too many"):
        AuditConfig(tokens=8_193, method="exact")


@pytest.mark.parametrize("workers", [2, 5])
def test_layers_at_a_time_make_the_same_audit(workers: int) -> None:
    one = audit_checkpoint("demo", tokens=32)
    some = audit_checkpoint("demo", tokens=32, workers=workers)
    assert some.rows == one.rows and some.caveats == one.caveats


def test_the_next_layer_s_bytes_travel_while_one_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer is finished only when the reading of the next one has begun: alone, it would wait."""
    begun, started = [], threading.Event()
    read, compute = Layers.tensors, Auditor.layer

    def reading(self: Any, layout: Any) -> Any:
        begun.append(layout.name)
        if len(begun) == 2:
            started.set()
        return read(self, layout)

    def computing(self: Any, *given: Any) -> Any:
        assert started.wait(60)
        return compute(self, *given)

    monkeypatch.setattr(Layers, "tensors", reading)
    monkeypatch.setattr(Auditor, "layer", computing)
    assert len(audit_checkpoint("demo", tokens=32, workers=2).rows) == 16
    assert len(begun) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_a_timeline_is_its_audits_in_order(workers: int, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for file in DEMO.iterdir():
        shutil.copy(file, tmp_path / "other" / file.name)
    sources = ["demo", tmp_path / "other", "demo"]
    line = audit_timeline(sources, tokens=32, workers=workers)
    assert [audit.name for audit in line.audits] == [
        audit_checkpoint(source, tokens=32).name for source in sources
    ]
    assert all(audit.rows == line.audits[0].rows for audit in line.audits)
    with pytest.raises(LocaterError, match="nowhere"):
        audit_timeline(["demo", tmp_path / "nowhere"], tokens=32, workers=workers)
