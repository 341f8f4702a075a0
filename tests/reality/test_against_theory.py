"""Theory against reality: exact on Gaussian tokens, honest about held-out text."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater import (
    ConfigError,
    InputError,
    LocaterError,
    TokenProcess,
    find_attention,
    propagation,
)
from locater.cli import main
from locater.core.score import SampledHeads
from locater.core.theory import attention_entropy
from locater.models.loading import load_model, read_text, text_blocks
from locater.reality.against_theory import (
    Reality,
    RealityConfig,
    against_theory,
    measure,
    rank_correlation,
)
from locater.reality.predictions import KeyClusters, _far_apart

QUICK = RealityConfig(draws=200, exact=False, batch=500)


class Attentive(nn.Module):
    """A model whose tokens are its inputs: the theory's assumptions hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(12, 2, batch_first=True)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.5 * noise)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.self_attn(tokens, tokens, tokens, need_weights=False)[0]
        return result


def gaussian_tokens(count: int, seed: int) -> tuple[TokenProcess, Tensor]:
    generator = torch.Generator().manual_seed(99)
    root = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    mean = torch.randn(8, 12, generator=generator, dtype=torch.float64)
    process = TokenProcess.autoregressive(8, 0.7, covariance=root @ root.mT / 12)
    process = replace(process, mean=0.5 * mean)
    return process, process.sample(count, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.statistical  # resolution: 0.03 of ρ at every position
def test_gaussian_tokens_are_predicted_to_the_noise_of_counting(seed: int) -> None:
    model = Attentive(0)
    process, tokens = gaussian_tokens(8000, seed)
    (layer,) = against_theory(model, tokens, replace(QUICK, exact=True)).layers
    (attention,) = find_attention(model)
    true = propagation(attention.form(), process).rho.detach()
    # counting 4,000 blocks is binomial around the exact ρ of the true process
    error = (true * (1 - true) / 4000).sqrt().clamp_min(1 / 4000)
    limit = NormalDist().inv_cdf(1 - 1e-6 / (2 * true.numel()))
    assert ((layer.measured.profile.rho - true).abs() < limit * error).all()
    # estimated moments say more than as many counts, so their ρ is at least as near
    for column in ("exact", "full", "given_query"):
        predicted = layer.predictions[column].profile.rho
        assert ((predicted - true).abs() < limit * error).all()
        assert layer.rho_error(column).mean() < 3 * layer.rho_noise.mean()
    assert layer.rho_error("printed").mean() > 10 * layer.rho_noise.mean()
    drawn = layer.predictions["full"].entropy
    assert drawn is not None
    noise = layer.measured.entropy_error * math.sqrt(4000 / 200 + 2)
    assert ((drawn - layer.measured.entropy).abs() < limit * noise).all()
    assert layer.logit_gap < 1e-4
    assert layer.explained > 0.95


def test_held_out_blocks_never_reach_a_prediction() -> None:
    model = Attentive(1)
    _, tokens = gaussian_tokens(400, 0)
    changed_test, changed_train = tokens.clone(), tokens.clone()
    changed_test[200:] *= 3
    changed_train[:200] *= 3
    plain, later, earlier = (
        against_theory(model, blocks, QUICK).layers[0]
        for blocks in (tokens, changed_test, changed_train)
    )
    for column, prediction in plain.predictions.items():
        assert torch.equal(prediction.profile.rho, later.predictions[column].profile.rho)
        if column not in ("printed", "walk"):
            other = earlier.predictions[column].profile.rho
            assert not torch.equal(prediction.profile.rho, other)
    assert torch.equal(plain.measured.profile.rho, earlier.measured.profile.rho)
    assert not torch.equal(plain.measured.profile.rho, later.measured.profile.rho)
    assert torch.equal(plain.in_sample.entropy, later.in_sample.entropy)


def test_fewer_blocks_change_the_estimate_and_not_the_measurement() -> None:
    model = Attentive(1)
    _, tokens = gaussian_tokens(400, 0)
    few = against_theory(model, tokens, replace(QUICK, estimate_blocks=40))
    all_ = against_theory(model, tokens, QUICK)
    assert (few.estimated_on, few.measured_on) == (40, 200)
    assert torch.equal(few.layers[0].measured.entropy, all_.layers[0].measured.entropy)
    other = against_theory(model, tokens, QUICK, other=tokens[:100])
    assert other.measured_on == 100
    full = other.layers[0]
    assert torch.equal(
        full.predictions["full"].profile.rho, all_.layers[0].predictions["full"].profile.rho
    )


def test_measurement_is_by_definition() -> None:
    logits = torch.tensor([[[4.0, 0.0]], [[0.0, 0.0]], [[0.5, 0.0]], [[0.0, 0.5]]]).double()
    seen = measure(logits)
    torch.testing.assert_close(seen.profile.rho, torch.tensor([[0.75, 0.75]]).double())
    attention = torch.softmax(logits, -1)
    torch.testing.assert_close(seen.attention, attention.mean(0))
    centered = logits - logits.mean(-1, keepdim=True)
    torch.testing.assert_close(seen.logit_variance, centered.var(0))
    assert (seen.entropy_bound <= seen.entropy).all()


def test_rank_correlation_knows_ties_and_order() -> None:
    first = torch.tensor([1.0, 2.0, 2.0, 5.0])
    assert rank_correlation(first, first**3) == pytest.approx(1)
    assert rank_correlation(first, -first) == pytest.approx(-1)


@pytest.fixture(scope="module")
def reality(samples: Path) -> Reality:
    model, tokenizer = load_model(samples / "model")
    blocks = text_blocks(tokenizer, read_text(samples / "text.txt"), tokens=8, blocks=200)
    return against_theory(model, blocks, QUICK)


def test_a_llama_checkpoint_is_predicted_head_by_head(reality: Reality) -> None:
    assert [layer.layer for layer in reality.layers] == [0, 1]
    assert [layer.best for layer in reality.layers] == ["rotary", "rotary"]
    assert len(reality.rows()) == 8
    # the forms reproduce the model's own logits: rotation, grouped keys and all
    assert max(layer.logit_gap for layer in reality.layers) < 1e-4
    summary = reality.summary()
    assert summary["rho_error_full"] < summary["rho_error_printed"]
    assert json.dumps(reality.layer_rows()) and json.dumps(summary)
    for row in reality.rows():
        assert row["entropy_bound"] <= row["entropy"] <= math.log(8) + 1e-9


def test_gpt2_and_bert_run_too() -> None:
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

    small: dict[str, Any] = {"vocab_size": 30}
    gpt2 = GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, **small))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    bert = BertModel(BertConfig(num_hidden_layers=1, **sizes, **small))
    blocks = torch.randint(30, (64, 8), generator=torch.Generator().manual_seed(0))
    for model in (gpt2, bert):
        found = against_theory(model, blocks, QUICK)
        assert found.layers[0].logit_gap < 1e-4
        assert found.layers[0].best == "means"


def test_blocks_are_spread_and_do_not_overlap(samples: Path) -> None:
    _, tokenizer = load_model(samples / "model")
    words = read_text(samples / "text.txt").split()
    blocks = text_blocks(tokenizer, " ".join(words), tokens=8, blocks=10_000)
    assert blocks.shape == (len(words) // 8, 8)
    assert tokenizer.decode(blocks.flatten()[:50].tolist()).split() == words[:50]
    few = text_blocks(tokenizer, " ".join(words), tokens=8, blocks=4)
    assert few.shape == (4, 8)
    assert len({tuple(row) for row in few.tolist()}) == 4


def test_an_opening_token_stands_before_a_block() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: place for place, word in enumerate(("[UNK]", "[CLS]", "[SEP]", "a", "b"))}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    blocks = text_blocks(tokenizer, "a b " * 50, tokens=6, blocks=5, special=True)
    assert blocks[0].tolist() == [1, 3, 4, 3, 4, 3]
    plain_blocks = text_blocks(tokenizer, "a b " * 50, tokens=6, blocks=5)
    assert plain_blocks[0].tolist() == [3, 4, 3, 4, 3, 4]


def command(samples: Path, *more: str) -> list[str]:
    arguments = ["explain", str(samples / "model"), "--text", str(samples / "text.txt")]
    return [*arguments, "--tokens", "8", "--blocks", "100", *more]


def test_the_command_prints_json_a_table_and_a_page(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(samples, "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["heads"]) == 8 and len(data["layers"]) == 2
    assert main(command(samples, "--top", "3")) == 0
    printed = capsys.readouterr().out
    assert "8 heads; moments of 50 blocks of 8 tokens, measured on 50 others." in printed
    worst = sorted(data["heads"], key=lambda row: -row["rho_error_full"])[0]
    first = next(line for line in printed.splitlines() if line.startswith(" layer"))
    assert f"layer {worst['layer']} head {worst['head']} " in first
    assert f"{worst['entropy']:.2f}" in first
    page = tmp_path / "page.html"
    assert main(command(samples, "--exact", "--out", str(page))) == 0
    text = page.read_text()
    assert "Theory against reality" in text and "full moments, Gaussian law" in text
    assert main(command(samples, "--layers", r"\.1\.", "--out", str(tmp_path / "a.svg"))) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--tokens", "2"), "cannot make"),
        (("--blocks", "10"), "blocks leave"),
        (("--estimate", "1.5"), "estimate must lie between 0 and 1, got 1.5"),
        (("--top", "-1"), "top must be at least 0"),
        (("--layers", "nothing"), "selects none"),
        (("--text", "missing.txt"), "cannot read missing.txt"),
    ],
)
def test_mistakes_are_explained(
    change: Sequence[str], message: str, samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(samples, *change)) == 1
    assert message in capsys.readouterr().err


def test_models_that_are_not_there_are_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no"):
        load_model(tmp_path / "nothing")
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(InputError, match="no GGUF file"):
        load_model(tmp_path / "weights.bin")
    with pytest.raises(LocaterError, match="transformers cannot load"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="estimate_blocks"):
        RealityConfig(estimate_blocks=2)


def test_an_audit_of_a_text_rests_on_its_tokens(
    samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [str(samples / "model"), "--tokens", "16", "--json"]
    assert main(["audit", *where]) == 0
    assumed = json.loads(capsys.readouterr().out)
    assert main(["audit", *where, "--text", str(samples / "text.txt")]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert "measured tokens of 2 layers" in measured["process"]
    assert not any("no text was read" in one or "gains" in one for one in measured["caveats"])
    pairs = list(zip(assumed["rows"], measured["rows"], strict=True))
    assert all((a["layer"], a["head"]) == (b["layer"], b["head"]) for a, b in pairs)
    assert all(a["entropy"] != b["entropy"] for a, b in pairs)
    assert all(a["frobenius_ratio"] > 0 for a, _ in pairs)
    assert main(["audit", *where, "--text", str(samples / "text.txt"), "--heads", "4"]) == 1
    assert "--text loads the model itself" in capsys.readouterr().err


def test_copying_stands_beside_the_theory_and_counting_noise_is_taken_off() -> None:
    """On blocks of one law the copy is off by counting alone: nothing is left beyond the noise."""
    _, blocks = gaussian_tokens(4000, 3)
    reality = against_theory(Attentive(0), blocks, QUICK)
    for layer in reality.layers:
        copied = layer.predictions["copy"]
        assert torch.equal(copied.profile.rho, layer.in_sample.profile.rho)
        error = copied.profile.standard_error
        assert error is not None and copied.entropy is not None
        # both halves are counted, so the difference has twice the variance of one
        gap = copied.profile.rho - layer.measured.profile.rho
        assert bool((gap.abs() <= 6 * 2**0.5 * error + 1e-9).all())
        beyond = layer.rho_error_beyond_noise("copy")
        noise = layer.measured.profile.standard_error
        assert noise is not None
        expected = (gap.square() - noise.square()).mean(-1)
        assert torch.allclose(beyond, expected.clamp_min(0).sqrt())
    summary = reality.summary()
    worst = summary["worst_heads"]["copy"]["rho"]
    rows = reality.rows()
    assert worst["worst"] == max(row["rho_error_copy"] for row in rows)
    assert worst["median"] <= worst["p90"] <= worst["worst"]
    assert summary["rho_error_copy"] < summary["rho_error_printed"]


def test_layers_that_do_not_fit_together_are_sampled_one_by_one(
    samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_model(samples / "model")
    blocks = text_blocks(tokenizer, read_text(samples / "text.txt"), tokens=8, blocks=60)
    config = RealityConfig(draws=20, exact=False)
    together = against_theory(model, blocks, config)
    monkeypatch.setattr("locater.probe.samples._MEMORY", 1)
    passes: list[int] = []
    apart = against_theory(
        model, blocks, config,
        report=lambda stage, done, total: passes.append(done) if stage == "model" else None,
    )  # fmt: skip
    assert passes.count(len(blocks)) == len(apart.layers) == 2
    assert together.rows() == apart.rows()


def test_a_model_is_loaded_where_and_as_it_is_asked_for(samples: Path) -> None:
    model, tokenizer = load_model(samples / "model", dtype="bfloat16")
    assert next(model.parameters()).dtype == torch.bfloat16
    blocks = text_blocks(tokenizer, read_text(samples / "text.txt"), tokens=8, blocks=60)
    reality = against_theory(model, blocks, RealityConfig(draws=20, exact=False))
    # the logits were rounded to 8 bits after the product: 2^-8 of the largest is the gap
    assert all(layer.logit_gap < 0.1 for layer in reality.layers)
    with pytest.raises(ConfigError, match="no device"):
        load_model(samples / "model", device="cuda:99")


def few_kinds(blocks: int, seed: int) -> Tensor:
    """Tokens of three kinds, a little noisy: far from Gaussian, as letters are."""
    generator = torch.Generator().manual_seed(seed)
    kinds = 2 * torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    label = torch.randint(3, (blocks, 8), generator=generator)
    return kinds[label] + 0.1 * torch.randn(blocks, 8, 12, generator=generator)


def test_clusters_of_keys_predict_tokens_of_few_kinds_where_a_gaussian_law_does_not() -> None:
    summary = against_theory(Attentive(5), few_kinds(1600, 2), QUICK).summary()
    assert summary["rho_error_clusters"] < 0.5 * summary["rho_error_given_query"]
    assert summary["rho_error_clusters"] < 2 * summary["rho_noise"]
    # 800 blocks and 200 drawn rows, entropies that stray by half a nat: a standard error of .04
    assert summary["entropy_error_clusters"] < 4 * 0.04 < summary["entropy_error_given_query"]


def test_one_cluster_is_the_gaussian_law_given_the_query() -> None:
    _, tokens = gaussian_tokens(300, 5)
    (attention,) = find_attention(Attentive(2))
    heads = SampledHeads.of(attention.form(), tokens)
    generator = torch.Generator().manual_seed(0)
    ours = torch.stack([KeyClusters.of(one, 1, generator).rho() for one in heads.each()])
    # all positions share one covariance here, which is what differs: some per cent of the variance
    torch.testing.assert_close(ours, heads.rho_given_query(), atol=0.05, rtol=0)


def strayed(counts: Tensor, chances: Tensor) -> Tensor:
    """How many standard errors counts stand from what independent draws give."""
    total = counts.sum()
    return (counts - total * chances) / (total * chances * (1 - chances)).clamp_min(1e-9).sqrt()


@pytest.mark.statistical  # 17 counts, 5 standard errors: one false alarm in 10⁵
def test_clusters_are_drawn_by_their_shares(seed: int) -> None:
    """Logits without spread that name their cluster: one share is zero, and is never drawn."""
    share = torch.tensor([[0.2, 0.0, 0.5, 0.3], [0.0, 0.01, 0.09, 0.9]], dtype=torch.float64)
    names = torch.arange(4.0, dtype=torch.float64).expand(1, 2, 4)
    clusters = KeyClusters(torch.ones(1, 1), names, torch.zeros(1, 4).double(), share[None])
    rows = clusters.rows(20_000, torch.Generator().manual_seed(seed)).long()
    counts = torch.stack([rows[:, place].bincount(minlength=4) for place in (0, 1)])
    for count, chances in zip(counts.double(), share, strict=True):
        assert bool((count[chances == 0] == 0).all())
        assert strayed(count, chances).abs().max() < 5


@pytest.mark.statistical
def test_centers_begin_as_in_k_means_plus_plus(seed: int) -> None:
    """Second and third by squared distance from the nearest before them, as in its definition."""
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [3.0, 1.0]], dtype=torch.float64)
    square = torch.cdist(points, points).square()
    second = square[0] / square[0].sum()
    near = torch.minimum(square[0], square)  # by the second one chosen
    pairs = second[:, None] * near / near.sum(1, keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([_far_apart(points, 3, generator) for _ in range(4000)])
    index = torch.cdist(chosen, points).argmin(-1)
    assert bool((index[:, 0] == 0).all())
    counts = (4 * index[:, 1] + index[:, 2]).bincount(minlength=16).double()
    assert bool((counts[pairs.flatten() == 0] == 0).all())
    assert strayed(counts, pairs.flatten()).abs().max() < 5


@pytest.mark.parametrize("query", [0, 3])
def test_another_query_is_asked_as_the_model_answers_it(query: int) -> None:
    """Of an attention that sees all keys the order of keys says nothing."""
    _, tokens = gaussian_tokens(400, 3)
    model = Attentive(1)
    reality = against_theory(model, tokens, replace(QUICK, query=query))
    half = tokens[200:]
    _, weights = model.self_attn(half, half, half, average_attn_weights=False)
    entropy = attention_entropy(weights[:, :, query].double()).mean(0)
    torch.testing.assert_close(reality.layers[0].measured.entropy, entropy, atol=1e-4, rtol=0)
    assert reality.layers[0].logit_gap < 1e-3
    with pytest.raises(ConfigError, match="query must be a token of 8, got 8"):
        against_theory(model, tokens, replace(QUICK, query=8))
