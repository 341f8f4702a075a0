"""What the laboratory measures is what the probe sees, and training does not notice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locater.core.theory import propagation
from locater.models.live import find_attention
from locater.paper.lab.batches import Batches, generator
from locater.paper.lab.measure import Meter
from locater.paper.lab.model import Transformer, TransformerConfig
from locater.paper.lab.presets import preset_named
from locater.paper.lab.train import train
from locater.probe.probe import Probe

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


def test_entropy_rho_and_prediction_are_the_probes(model: Transformer) -> None:
    record = Meter(model, BATCHES, BATCHES, torch.device("cpu")).measure(predicts=True)
    inputs, _ = BATCHES.at(0)
    model.eval()
    with torch.no_grad(), Probe(model, queries="all") as every:
        model(inputs)
    with torch.no_grad(), Probe(model, queries="last") as last:
        model(inputs)
    for layer, attention in enumerate(find_attention(model)):
        # the record has six digits, three for ρ
        # the first token has nothing to choose: the probe leaves its entropy of 0 out
        rows = 11 / 12 if model.config.task == "causal" else 1
        entropy = rows * every.records[layer].entropy
        assert record["entropy"][layer] == pytest.approx(entropy, rel=1e-5)
        assert record["max_logit"][layer] == pytest.approx(every.records[layer].max_logit, rel=1e-5)
        rho = last.records[layer].rho.rho.tolist()
        assert record["rho"][layer] == pytest.approx(rho, abs=5.1e-4)
        assert min(rho) < 0.95  # or nothing would be told apart
        process = last.process(layer)
        exact = propagation(attention.form().to(torch.float64), process).rho[0].tolist()
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
