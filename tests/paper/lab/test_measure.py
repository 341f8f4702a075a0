"""What the laboratory measures is what its model does, and training does not notice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from locater.core.process import TokenProcess
from locater.core.theory import attention_entropy, propagates, propagation
from locater.models.live import find_attention
from locater.paper.lab.batches import Batches, generator
from locater.paper.lab.model import Transformer, TransformerConfig
from locater.paper.lab.presets import preset_named
from locater.paper.lab.train import Meter, train

TOKENS = torch.randint(20, (2_000,), generator=torch.Generator().manual_seed(0))
BATCHES = Batches(TOKENS, length=12, batch=64, seed=0)


@pytest.fixture(scope="module", params=["causal", "masked"])
def model(request: pytest.FixtureRequest) -> Transformer:
    config = TransformerConfig(vocabulary=20, dim=16, layers=2, length=12, task=request.param)
    found = Transformer(config, generator("measure"))
    with torch.no_grad():  # sharp enough to tell tokens apart
        for layer in found.layers:
            layer.self_attn.q_proj.weight.mul_(3)  # type: ignore[operator, union-attr]
    return found


def test_entropy_logits_rank_and_rho_are_those_of_the_dense_attention(model: Transformer) -> None:
    record = Meter(model, BATCHES, BATCHES, torch.device("cpu")).measure(predicts=True)
    inputs, _ = BATCHES.at(0)
    shown: list[Tensor] = []
    for block in model.layers:
        block.self_attn.register_forward_pre_hook(lambda _, args: shown.append(args[0]))  # type: ignore[operator, union-attr]
    with torch.no_grad():
        model.eval()(inputs)
    for layer, (attention, tokens) in enumerate(zip(find_attention(model), shown, strict=True)):
        form = attention.form().to(torch.float64)
        x = tokens.double().detach()
        assert form.query_bias is not None and form.key_bias is not None
        query = x @ form.query[0].mT + form.query_bias[0]
        logits = query @ (x @ form.key[0].mT + form.key_bias[0]).mT / form.temperature
        if model.config.task == "causal":
            logits = logits.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
        # the record has six digits, three for ρ
        entropy = attention_entropy(logits.softmax(-1)).mean().item()  # 0 for the first token
        assert record["entropy"][layer] == pytest.approx(entropy, rel=1e-5)
        assert record["max_logit"][layer] == pytest.approx(logits.amax().item(), rel=1e-5)
        squares = torch.linalg.svdvals(x).square()
        rank = (squares.sum(-1) ** 2 / squares.square().sum(-1)).mean().item()
        assert record["rank"][layer] == pytest.approx(rank, rel=1e-5)
        rho = propagates(logits[:, -1]).double().mean(0).tolist()
        assert record["rho"][layer] == pytest.approx(rho, abs=5.1e-4)
        assert min(rho) < 0.95  # or nothing would be told apart
        exact = propagation(form, TokenProcess.from_samples(x)).rho[0].tolist()
        assert record["predicted_rho"][layer] == pytest.approx(exact, abs=1e-3)


def test_the_spectrum_is_that_of_the_dense_matrix(model: Transformer) -> None:
    record = Meter(model, BATCHES, BATCHES, torch.device("cpu")).measure(predicts=True)
    for layer, block in enumerate(model.layers):
        attention = block.self_attn
        dense = attention.q_proj.weight.double().mT @ attention.k_proj.weight.double()  # type: ignore[operator, union-attr]
        values = torch.linalg.eigvals(dense)
        assert record["trace"][layer] == pytest.approx(dense.trace().item(), rel=1e-5)
        assert record["frobenius_squared"][layer] == pytest.approx(
            dense.square().sum().item(), rel=1e-5
        )
        assert sum(real for real, _ in record["eigenvalues"][layer]) == pytest.approx(
            values.real.sum().item(),
            abs=16 * 5e-4 * values.abs().max().item(),  # four digits each
        )


def test_a_collapsed_sequence_has_rank_one(model: Transformer) -> None:
    same = Batches(torch.zeros(2_000, dtype=torch.int64), length=12, batch=64, seed=0)
    positions = model.positions.clone()
    try:
        model.positions.zero_()
        ranks = Meter(model, same, same, torch.device("cpu")).measure()["rank"]
    finally:
        model.positions.copy_(positions)
    assert ranks == pytest.approx([1.0, 1.0], rel=1e-5)
    assert Meter(model, BATCHES, BATCHES, torch.device("cpu")).measure()["rank"][0] > 2


def test_training_does_not_notice_that_it_is_measured(tmp_path: Path) -> None:
    text = tmp_path / "lines.txt"
    lines = torch.randint(9, (100, 12), generator=torch.Generator().manual_seed(1)).tolist()
    text.write_text("\n".join(" ".join("abcdefghi"[word] for word in line) for line in lines))
    weights = []
    for cadence in (1, 6):
        config = replace(
            preset_named("tiny"), corpus="lines.txt", vocabulary_size=None, steps=6,
            measure_every=cadence, stabilizer="sigma-reparam",
        )  # fmt: skip
        out = tmp_path / str(cadence)
        train(config, out, data=str(text), trackers=())
        weights.append((out / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
