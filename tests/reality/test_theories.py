"""Everybody's formulas against their definitions, and the table against what heads do."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.reality.test_against_theory import Attentive, gaussian_tokens
from torch import Tensor

from locater import LocaterError, QKForm
from locater.cli import main
from locater.core.bounds import entropy_lower_bound
from locater.core.theory import attention_entropy
from locater.reality.against_theory import RealityConfig
from locater.reality.theories import (
    MEASURED,
    THEORIES,
    Facts,
    directionality,
    largest_score,
    of_squares,
    power_law,
    product_bound,
    random_energy,
    spread_bound,
    symmetry,
    theories,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def facts(*, isotropic: bool = False) -> Facts:
    """Logits of forms on tokens, by definition."""
    form = QKForm(draw(3, 4, 16, seed=1) / 4, draw(3, 4, 16, seed=2) / 4, 2.0)
    tokens = draw(400, 24, 16, seed=3) + (0 if isotropic else 0.3)
    logits = torch.einsum("nm,hdm,hde,nte->nht", tokens[:, -1], form.query, form.key, tokens) / 2
    return Facts(form=form, inputs=tokens, logits=logits, squares={}, ours={})


@pytest.mark.statistical
@pytest.mark.parametrize("variance", [0.25, 1.0, 2.0])
def test_random_energies_are_the_entropy_of_independent_gaussian_logits(variance: float) -> None:
    # the formula is the limit T → ∞: ln T − H has the relative bias of a finite sum, 1/T e^v
    tokens, rows = 4096, 400
    logits = draw(rows, tokens, seed=4) * math.sqrt(variance)
    entropy = attention_entropy(torch.softmax(logits, -1))
    error = (entropy.std() / math.sqrt(rows)).item()
    bias = 2 * math.exp(variance) * (1 + variance) / tokens
    predicted = random_energy(torch.tensor(variance), tokens)
    assert abs(entropy.mean() - predicted) < 5 * error + bias
    # a twin: v in place of v/2 would be seen
    assert abs(entropy.mean() - (math.log(tokens) - variance)) > 5 * error + bias


def test_random_energies_freeze_where_they_should() -> None:
    at = torch.tensor([2 * math.log(64) - 0.2, 2 * math.log(64), 50.0], dtype=torch.float64)
    torch.testing.assert_close(random_energy(at, 64), torch.tensor([0.1, 0, 0]).double())


@given(seed=st.integers(0, 2**31), tokens=st.integers(2, 40), scale=st.floats(0.01, 20))
def test_bounds_hold_for_any_row(seed: int, tokens: int, scale: float) -> None:
    logits = draw(8, tokens, seed=seed) * scale
    entropy = attention_entropy(torch.softmax(logits, -1)) + 1e-9
    centered = logits - logits.mean(-1, keepdim=True)
    assert (entropy_lower_bound(centered.norm(dim=-1), tokens) <= entropy).all()
    spread = logits.amax(-1) - logits.amin(-1)
    assert (spread_bound(spread, tokens) <= entropy).all()


def test_norms_of_weights_and_tokens_bound_the_entropy_too() -> None:
    seen = facts()
    entropy = attention_entropy(torch.softmax(seen.logits, -1)).mean(0)
    assert (product_bound(seen) <= entropy).all()


def test_few_isotropic_tokens_pass_the_largest_score() -> None:
    seen = facts(isotropic=True)
    passed = (seen.logits.abs().amax(-1) > largest_score(seen)).double().mean(0)
    assert (passed <= 1e-3 + 3 * math.sqrt(1e-3 / 400)).all()
    # and it is no bound without content: a tenth of it is passed often
    assert (seen.logits.abs().amax(-1) > largest_score(seen) / 10).double().mean() > 0.5


@given(seed=st.integers(0, 2**31), head=st.integers(1, 4), model=st.integers(3, 9))
def test_symmetry_and_directionality_need_no_dense_matrix(seed: int, head: int, model: int) -> None:
    form = QKForm(draw(2, head, model, seed=seed), draw(2, head, model, seed=seed + 1), 1.0)
    dense = form.matrix()
    even, odd = (dense + dense.mT) / 2, (dense - dense.mT) / 2
    norms = [part.square().sum((-2, -1)) for part in (even, odd, dense)]
    torch.testing.assert_close(symmetry(form), (norms[0] - norms[1]) / norms[2])
    sums = []
    for size in (dense.norm(dim=-1), dense.norm(dim=-2)):  # of rows, of columns
        limit = size.mean(-1, keepdim=True) + size.std(-1, keepdim=True)
        sums.append((size * (size > limit)).sum(-1))
    expected = ((sums[0] - sums[1]) / (sums[0] + sums[1])).nan_to_num()  # 0: none stands out
    torch.testing.assert_close(directionality(form, deviations=1.0), expected)


@pytest.mark.statistical
@pytest.mark.parametrize("alpha", [2.0, 3.5])
def test_a_power_law_is_found(alpha: float) -> None:
    uniform = torch.rand(4000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    tail = uniform ** (-1 / (alpha - 1))  # Pareto above 1
    below = torch.linspace(0.01, 1, 60, dtype=torch.float64)
    # its standard error is (α − 1)/√n on the whole tail; a later start has fewer values
    assert abs(power_law(torch.cat((tail[:900], below))) - alpha) < 5 * (alpha - 1) / math.sqrt(300)


def test_squares_by_definition() -> None:
    attention = torch.softmax(draw(2, 3, 6, 6), -1)
    tokens = draw(2, 6, 5, seed=1)
    found = of_squares(attention, tokens)
    for block in range(2):
        for head in range(3):
            one = attention[block, head]
            values = torch.linalg.svdvals(one)
            mixed = torch.linalg.svdvals(one @ tokens[block]).square()
            assert found["gap"][block, head].item() == pytest.approx((values[0] / values[1]).item())
            rank = (mixed.sum() / mixed[0]).item()
            assert found["rank"][block, head].item() == pytest.approx(rank)
            assert found["sink"][block, head].item() == pytest.approx(one[:, 0].mean().item())


@pytest.fixture(scope="module")
def league() -> Any:
    _, tokens = gaussian_tokens(400, 7)
    config = RealityConfig(draws=200, batch=400)
    return theories(Attentive(3), tokens, config, squares=20)


def test_every_theory_is_judged_and_bounds_are_below(league: Any) -> None:
    rows = {row["name"]: row for row in league.rows()}
    assert {one.name for one in THEORIES} <= set(rows) and len(rows) >= 20
    for head in league.heads:
        assert set(MEASURED) <= set(head)
        for theory in THEORIES:
            if theory.kind == "bound" and theory.target == "entropy":
                assert head["theories"][theory.name] <= head["entropy"] + 0.1  # other blocks
    assert rows["full moments"]["error"] < 0.1  # Gaussian tokens: the theory is right
    assert rows["Eq. 9, measured norms"]["error"] > rows["full moments"]["error"]
    assert all((row["error"] is None) == (row["kind"] == "order") for row in rows.values())


def test_the_measured_is_what_the_model_does(league: Any) -> None:
    """Entropy and sinks of the second half, by torch's own attention weights."""
    _, tokens = gaussian_tokens(400, 7)
    model = Attentive(3)
    half = tokens[200:]
    _, weights = model.self_attn(half, half, half, average_attn_weights=False)
    last = weights[:, :, -1].double()
    entropy = attention_entropy(last).mean(0)
    for head in league.heads:
        assert head["entropy"] == pytest.approx(entropy[head["head"]].item(), abs=1e-4)
        assert head["sink"] == pytest.approx(last[:, head["head"], 0].mean().item(), abs=1e-5)
        assert head["sharpness"] == pytest.approx(
            last[:, head["head"]].amax(-1).mean().item(), abs=1e-5
        )


def test_another_query_is_judged_and_what_explain_skips_is_skipped() -> None:
    _, tokens = gaussian_tokens(400, 7)
    model = Attentive(3)
    config = RealityConfig(draws=20, batch=400, query=2)
    found = theories(model, tokens, config, squares=20)
    half = tokens[200:]
    _, weights = model.self_attn(half, half, half, average_attn_weights=False)
    entropy = attention_entropy(weights[:, :, 2].double()).mean(0)
    for head in found.heads:
        assert head["entropy"] == pytest.approx(entropy[head["head"]].item(), abs=1e-4)
    with pytest.raises(LocaterError, match="query must be a token of"):
        theories(model, tokens, replace(config, query=tokens.shape[1]), squares=20)
    fixed = tokens.clone()
    fixed[:, -1] = fixed[0, -1]
    with pytest.raises(LocaterError, match="its query is the same in every block"):
        theories(model, fixed, replace(config, query=-1), squares=20)


def test_the_command_prints_data_and_writes_a_page(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["theories", str(samples / "model"), "--text", str(samples / "text.txt"), "--tokens",
            "16", "--blocks", "40", "--draws", "20", "--json", "--out",
            str(tmp_path / "page.html")]  # fmt: skip
    assert main(line) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["theories"]) >= 20 and len(data["heads"]) == 8
    page = (tmp_path / "page.html").read_text()
    assert "random energies" in page and "aria-sort" in page
