"""Each rival does what its paper says, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from locater import ConfigError, InputError, find_attention
from locater.control.stabilizers import UnitNorm
from locater.paper.lab.model import (
    STABILIZERS,
    Attention,
    Transformer,
    TransformerConfig,
    apply_stabilizer,
)

RATE = 1e-2


def built(**settings: object) -> Transformer:
    defaults = {"vocabulary": 40, "dim": 16, "length": 12, "heads": 2, "layers": 2, "dropout": 0.0}
    config = TransformerConfig(**{**defaults, **settings})  # type: ignore[arg-type]
    return Transformer(config, torch.Generator().manual_seed(0))


def tokens() -> Tensor:
    return torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(1))


def train(model: Transformer, handle: object, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(tokens(), tokens().roll(-1, 1)).backward()
        optimizer.step()
        handle.after_step()  # type: ignore[attr-defined]


def largest_logits(model: Transformer) -> list[Tensor]:
    """Each layer's largest logit by head, over what the mask lets through, from q, k and norms."""
    found: list[Tensor] = []
    handles = [
        attention.register_forward_pre_hook(lambda own, args: found.append(_dense(own, *args)))
        for attention in attentions(model)
    ]
    with torch.no_grad():
        model(tokens())
    for handle in handles:
        handle.remove()
    return found


def _dense(attention: nn.Module, hidden: Tensor) -> Tensor:
    assert isinstance(attention, Attention)
    query, key = (
        norm(side(hidden).unflatten(2, (-1, attention.head_dim)).transpose(1, 2))
        for side, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        )
    )
    logits = query @ key.mT * attention.scaling
    if attention.is_causal:
        visible = torch.ones(12, 12, dtype=torch.bool).tril()
        logits = torch.where(visible, logits, -torch.inf)
    return logits.amax(dim=(0, 2, 3))


def attentions(model: Transformer) -> list[Attention]:
    return [one for one in model.modules() if isinstance(one, Attention)]


def spectral_norms(linears: dict[str, nn.Linear]) -> Tensor:
    return torch.stack(
        [torch.linalg.matrix_norm(one.weight.detach(), 2) for one in linears.values()]
    )


def test_sigma_reparam_gives_every_inner_weight_its_gain_as_norm() -> None:
    model = built(layers=1)
    handle = apply_stabilizer(model, "sigma-reparam")
    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    assert len(linears) == 6 + 1
    for name, one in linears.items():
        norm = torch.linalg.matrix_norm(one.weight.detach(), 2).item()
        assert (norm == pytest.approx(1, rel=1e-5)) == (name != "output"), name
    train(model, handle, 30)
    del linears["output"]
    units = [one.parametrizations.weight[0] for one in linears.values()]  # type: ignore[index, union-attr]
    gains = torch.stack([unit.gain.detach() for unit in units])
    assert (gains != 1).all()
    # one power iteration a step follows a weight that moves: it can only underestimate σ
    assert (spectral_norms(linears) >= gains * (1 - 1e-5)).all()
    for _ in range(500):  # a weight that rests is caught up with
        handle.after_step()
    torch.testing.assert_close(spectral_norms(linears), gains, rtol=1e-4, atol=0)


def test_reading_a_reparametrized_weight_leaves_it_as_it_was() -> None:
    model = built()
    handle = apply_stabilizer(model, "sigma-reparam")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    for attention in find_attention(model):
        attention.form()
    model(tokens())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    other = built()
    apply_stabilizer(other, "sigma-reparam")
    train(model, handle, 3)
    other.load_state_dict(model.state_dict())  # gains and iteration vectors are in a checkpoint
    assert torch.equal(other.eval()(tokens()), model.eval()(tokens()))


def test_gradients_flow_through_the_spectral_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    unit = UnitNorm(weight)
    assert torch.autograd.gradcheck(unit, (weight.requires_grad_(),))
    exact = weight / torch.linalg.matrix_norm(weight, 2)
    torch.testing.assert_close(unit(weight), exact)
    cotangent = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(unit(weight), weight, cotangent),
        torch.autograd.grad(exact, weight, cotangent),
    )


def test_qk_norm_bounds_every_logit() -> None:
    """Normalized vectors have length √h, so that a logit is at most h / λ = √h."""
    model = built()
    with torch.no_grad():
        for attention in attentions(model):
            attention.q_proj.weight.mul_(100)
    bound = (16 / 2) ** 0.5
    assert max(one.max() for one in largest_logits(model)) > 3 * bound
    apply_stabilizer(model, "qk-norm")
    assert max(one.max() for one in largest_logits(model)) <= bound * (1 + 1e-5)
    assert all(one.layout.qk_norm for one in find_attention(model))
    names = {name for name, _ in model.named_parameters() if "q_norm" in name or "k_norm" in name}
    assert len(names) == 4  # a gain for queries and keys of both layers, no bias


@pytest.mark.parametrize("qk", ["factored", "joint"])
def test_qk_clip_brings_the_largest_logit_to_the_limit(qk: str) -> None:
    model = built(qk=qk, layers=1)
    with torch.no_grad():
        for attention in attentions(model):
            attention.q_proj.weight[: attention.head_dim].mul_(20)  # the first head alone
    (before,) = largest_logits(model)
    limit = 2 * before[1].item()
    assert before[0] > limit
    handle = apply_stabilizer(model, "qk-clip", max_logit=limit)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    model(tokens())
    handle.after_step()  # what was seen in evaluation does not count
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.train()
    model(tokens())
    handle.after_step()
    (after,) = largest_logits(model)
    torch.testing.assert_close(after, torch.stack([torch.tensor(limit), before[1]]))
    assert torch.equal(model.output.weight, state["output.weight"])
    clipped = {name: value.clone() for name, value in model.state_dict().items()}
    handle.after_step()  # nothing was seen since
    assert all(torch.equal(value, clipped[name]) for name, value in model.state_dict().items())


def test_qk_clip_holds_the_logits_through_training() -> None:
    model, free = built(), built()
    train(free, apply_stabilizer(free, "none"), 60)
    limit = 0.5 * max(one.max().item() for one in largest_logits(free))
    handle = apply_stabilizer(model, "qk-clip", max_logit=limit)
    train(model, handle, 60)
    # a step moves each logit a little after the last clip; twice the limit is what free has
    assert max(one.max().item() for one in largest_logits(model)) < 1.5 * limit


def test_decay_shrinks_queries_and_keys_alone() -> None:
    model = built()
    handle = apply_stabilizer(model, "qk-weight-decay", decay=0.5, learning_rate=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    handle.after_step()
    for name, value in model.state_dict().items():
        factor = 0.95 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
        torch.testing.assert_close(value, factor * before[name])


@pytest.mark.parametrize("name", STABILIZERS)
@pytest.mark.parametrize("qk", ["factored", "joint"])
def test_every_stabilizer_trains_and_is_seen_by_locater(name: str, qk: str) -> None:
    model = built(qk=qk)
    handle = apply_stabilizer(model, name, learning_rate=RATE)  # type: ignore[arg-type]
    start = model.loss(tokens(), tokens().roll(-1, 1)).item()
    train(model, handle, 20)
    assert model.loss(tokens(), tokens().roll(-1, 1)).item() < start - 0.5
    assert len(find_attention(model)) == 2
    if qk == "joint" and name != "sigma-reparam":
        assert torch.equal(attentions(model)[0].k_proj.weight, torch.eye(16))


def test_settings_out_of_range_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"got 0\.1 times None"):
        apply_stabilizer(built(), "qk-weight-decay")
    with pytest.raises(ConfigError, match="max_logit must be positive, got 0"):
        apply_stabilizer(built(), "qk-clip", max_logit=0.0)
    with pytest.raises(InputError, match="Linear has no attention of the laboratory's"):
        apply_stabilizer(nn.Linear(2, 2), "qk-norm")


def test_a_soft_cap_bounds_the_logits_of_the_dense_definition() -> None:
    model = built()
    with torch.no_grad():
        for attention in attentions(model):
            attention.q_proj.weight.mul_(20)
    before = model(tokens())
    apply_stabilizer(model, "soft-cap", max_logit=2.0)
    attention, shown = attentions(model)[0], torch.randn(3, 12, 16)
    query, key, value = (
        part(shown).unflatten(2, (2, 8)).transpose(1, 2)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    logits = 2 * torch.tanh(query @ key.mT * 8**-0.5 / 2)
    assert (query @ key.mT * 8**-0.5).abs().max() > 4  # it does act
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)
    mixed = logits.masked_fill(future, -torch.inf).softmax(-1) @ value
    expected = attention.out_proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(shown), expected)
    assert not torch.allclose(model(tokens()), before)
    apply_stabilizer(model, "soft-cap", max_logit=1e4)  # so wide that nothing is bent
    torch.testing.assert_close(model(tokens()), before, rtol=1e-4, atol=1e-4)
