"""Every family's own logits, as they enter its softmax, follow from its recipe; and nothing else's.

The models are tiny and random, built offline from their configs, and their attention is their own.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.families import (
    FAMILIES,
    SHARED,
    SIZE,
    VISION,
    Observed,
    bias_of,
    mismatch,
    observed,
    shaken,
    tokens,
    watched,
    weight_of,
)

from locater import InputError, LocaterError
from locater.models.layout import Skipped
from locater.models.live import LiveAttention, find_attention
from locater.models.recipes import RECIPES, TRAITS, Recipe, known
from locater.models.resolve import layouts

EXACT = 1e-12  # float64 throughout
ANGLES = 32 * torch.finfo(torch.float32).eps  # models compute angles and slopes in float32
FUSED = [name for name, family in FAMILIES.items() if "fused" in family.traits]
NORMED = [name for name, family in FAMILIES.items() if "qk-norm" in family.traits]
ROTARY = ["llama", "gptj", "gpt_neox", "cohere", "phi3", "modernbert", "falcon, new", "phi"]


def tolerance(name: str) -> float:
    if "bfloat16" in FAMILIES[name].traits:  # Falcon's slopes times positions
        return torch.finfo(torch.bfloat16).eps
    return ANGLES if FAMILIES[name].traits & {"rotary", "float32"} else EXACT


def softcap(name: str) -> float | None:
    return FAMILIES[name].settings.get("attn_logit_softcapping")


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def stored_config(model: Any) -> dict[str, Any]:
    """The config as `config.json` keeps it."""
    return json.loads(model.config.to_json_string())


def worst(name: str, run: Observed, **changes: Any) -> float:
    """The largest mismatch over a model's attentions, after changing their layouts."""
    errors = []
    for live in run.found:
        changed = LiveAttention(replace(live.layout, **changes), live.sources, live.module)
        form, seen = changed.form(distances=64), run.seen[live.layout.name]
        errors.append(mismatch(form, seen, softcap=softcap(name)))
    return max(errors)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NORMED])
def test_a_models_own_logits_follow_from_its_form(name: str) -> None:
    run = observed(name)
    assert len(run.found) == FAMILIES[name].attentions
    assert not run.skipped
    assert worst(name, run) < tolerance(name)


@pytest.mark.parametrize("name", NORMED)
def test_a_form_with_norms_gives_the_logits_and_without_them_does_not(name: str) -> None:
    run = observed(name)
    assert all(live.layout.qk_norm for live in run.found)
    assert all("root mean square" in " ".join(live.layout.caveats) for live in run.found)
    assert worst(name, run) < tolerance(name)
    for live in run.found:
        plain = replace(live.form(distances=8), query_norm=None, key_norm=None)
        assert mismatch(plain, run.seen[live.layout.name], softcap=softcap(name)) > 0.1
    assert worst(name, observed(name, without_qk_norm=True)) > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_names_shapes_and_the_config_say_as_much_as_the_live_model(name: str) -> None:
    run = observed(name)
    found, skipped = layouts(shapes_of(run.model), stored_config(run.model))
    assert found == [live.layout for live in run.found]
    assert skipped == run.skipped


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_checkpoint_holds_the_forms_of_the_live_model(name: str, tmp_path: Path) -> None:
    run = observed(name)
    run.model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    found, skipped = layouts(shapes, json.loads((tmp_path / "config.json").read_text()))
    assert not skipped
    for layout, live in zip(found, run.found, strict=True):
        assert all(key in tensors for key in layout.tensors)
        moved = {"name": "", "query": live.layout.query, "key": live.layout.key}  # names may change
        moved["position_weight"] = layout.position_weight
        before = live.layout.before
        if before is not None and layout.before is not None:
            moved["before"] = replace(before, gain=layout.before.gain, bias=layout.before.bias)
            own = {name: live.sources[name].read() for name in live.layout.tensors_with_norm}
            gains = zip(layout.gain(tensors), live.layout.gain(own), strict=True)
            assert all(mine is theirs or torch.equal(mine, theirs) for mine, theirs in gains)
        assert replace(layout, **moved) == replace(live.layout, **moved)
        stored, form = layout.form(tensors, distances=8), live.form(distances=8)
        for field in ("query", "key", "query_bias", "key_bias", "distance_bias"):
            mine, theirs = getattr(stored, field), getattr(form, field)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)


def test_every_model_type_that_a_row_names_was_put_to_the_test() -> None:
    tested = {live.layout.family for name in FAMILIES for live in observed(name).found}
    tested |= {observed(name).model.config.model_type for name in FAMILIES}
    named = {kind for row in RECIPES for kind in row.model_types}
    assert {kind for kind in named - tested if known(kind).status is None} == set()
    types = {"locater", *transformers_types()}
    assert {kind for kinds in TRAITS.values() for kind in kinds} <= types


def transformers_types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return list(CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_form_gives_each_query_head_its_groups_key_head(name: str) -> None:
    for live in observed(name).found:
        layout, form = live.layout, live.form(distances=8)
        if layout.qk_norm or (layout.rotary is not None and layout.rotary.magnitude != 1):
            continue  # its form is scaled
        group = torch.arange(layout.heads) // (layout.heads // layout.kv_heads)
        assert torch.equal(form.query, weight_of(live, "query"))
        assert torch.equal(form.key, weight_of(live, "key")[group])
        for mine, own in (
            (form.query_bias, bias_of(live, "query")),
            (form.key_bias, bias_of(live, "key")),
        ):
            assert (mine is None) == (own is None)
        if form.query_bias is not None:
            assert torch.equal(form.query_bias, bias_of(live, "query"))
        if form.key_bias is not None:
            assert torch.equal(form.key_bias, bias_of(live, "key")[group])
        assert form.query.shape == (layout.heads, layout.head_dim, layout.model)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_tensor_cut_the_other_way_is_wrong(name: str) -> None:
    other = {"grouped": "concatenated"}
    swapped = [replace(row, packing=other.get(row.packing, "grouped")) for row in RECIPES]
    run = observed(name)
    for live in find_attention(run.model, recipes=swapped):
        form = live.form(distances=8)
        assert mismatch(form, run.seen[live.layout.name], softcap=softcap(name)) > 0.1


@pytest.mark.parametrize("name", ROTARY)
def test_the_other_rotary_layout_is_wrong(name: str) -> None:
    run = observed(name)
    rotary = run.found[0].layout.rotary
    assert rotary is not None
    other = "half" if rotary.layout == "interleaved" else "interleaved"
    assert worst(name, run, rotary=replace(rotary, layout=other)) > 0.01
    assert worst(name, run, rotary=None) > 0.01


@pytest.mark.parametrize("name", ["t5", "gpt_neo", "gemma2", "granite", "llama, yarn"])
def test_the_square_root_of_the_head_is_not_every_familys_temperature(name: str) -> None:
    run = observed(name)
    root = math.sqrt(run.found[0].layout.head_dim)
    assert worst(name, run, temperature=root) > 0.01


@pytest.mark.parametrize("name", ["llama", "falcon, new", "phi3"])
def test_key_heads_dealt_out_in_turn_are_wrong(name: str) -> None:
    run = observed(name)
    for live in run.found:
        form = live.form()
        turns = torch.arange(live.layout.heads) % live.layout.kv_heads
        dealt = replace(form, key=weight_of(live, "key")[turns])
        assert mismatch(dealt, run.seen[live.layout.name]) > 0.1


def test_self_and_cross_attention_are_told_apart() -> None:
    for name in ("t5", "bart", "whisper", "gpt2 with cross-attention", "bert with cross-attention"):
        for live in observed(name).found:
            layout = live.layout
            is_cross = any(part in layout.name for part in ("ncoder_attn", "EncDec", "cross"))
            assert layout.kind == ("cross" if is_cross else "self")
            assert any("two token processes" in text for text in layout.caveats) == is_cross
            assert layout.position_bias == ("t5" if name == "t5" and not is_cross else None)


def test_parts_of_composite_models_are_named() -> None:
    parts = {live.layout.name: live.layout.part for live in observed("clip").found}
    assert {name.partition(".")[0] for name, part in parts.items() if part == "text"} == {
        "text_model"
    }
    assert sorted(parts.values()) == ["text", "text", "vision", "vision"]
    parts = {live.layout.name: live.layout.part for live in observed("bart").found}
    assert all(name.startswith(part) for name, part in parts.items())
    heads = {live.layout.part: live.layout.heads for live in observed("whisper").found}
    assert heads == {"encoder": 4, "decoder": 2}


def test_caveats_say_what_the_spectrum_leaves_out() -> None:
    def said(name: str, layer: int = 0) -> str:
        return " | ".join(observed(name).found[layer].layout.caveats)

    assert "capped at ±3 by a tanh" in said("gemma2")
    assert "beyond a window of 4 tokens" in said("gemma3") and "window" not in said("gemma3", 1)
    assert "4 of 8 dimensions, base 10000" in said("phi")
    assert "biases add a term" in said("qwen2") and "biases" not in said("llama")
    assert "bias by distance (alibi)" in said("bloom")
    assert "learned sink" in said("gpt_oss")
    assert "one set of weights" in said("albert")
    assert "up to the original length" in said("phi3, long") and "scaled by 1.225" in said(
        "phi3, long"
    )
    assert all("after any LayerNorm" in said(name) for name in FAMILIES)


OLD_SPELLINGS = {
    "GPTNeoXConfig": {"rotary_pct": 0.5, "rotary_emb_base": 500},
    "PhiConfig": {"partial_rotary_factor": 0.25, "rope_theta": 300.0},
    "LlamaConfig": {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "Gemma3TextConfig": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    },
}


@pytest.mark.parametrize("config", OLD_SPELLINGS)
def test_configs_of_earlier_versions_mean_the_same(config: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    old = {**SHARED, **OLD_SPELLINGS[config]}
    now = getattr(transformers, config)(**old)
    with torch.device("meta"):
        shapes = shapes_of(transformers.AutoModel.from_config(now))
    found, _ = layouts(shapes, {**old, "model_type": now.model_type})
    expected, _ = layouts(shapes, now.to_dict())
    assert [one.rotary for one in found] == [one.rotary for one in expected]
    assert [one.temperature for one in found] == [one.temperature for one in expected]
    assert len({one.rotary for one in found}) == (2 if config == "Gemma3TextConfig" else 1)


def test_vision_transformers_are_read_under_the_names_that_files_keep(tmp_path: Path) -> None:
    run = observed("vit")
    run.model.save_pretrained(tmp_path)
    shapes = {
        key: tuple(part.shape) for key, part in load_file(tmp_path / "model.safetensors").items()
    }
    found, _ = layouts(shapes, stored_config(run.model))
    assert [one.name for one in found] == [f"encoder.layer.{k}.attention.attention" for k in (0, 1)]
    assert run.found[0].layout.name == "layers.0.attention"
    assert {one.part for one in found} == {"vision"}


@pytest.mark.parametrize(
    ("query", "key", "config"),
    [
        ("layers.{}.attention.wq", "layers.{}.attention.wk", {"n_heads": 4}),
        ("blk.{}.attn_q", "blk.{}.attn_k", {"n_heads": 4, "model_type": "llama"}),
    ],
)
def test_llama_in_the_order_of_its_authors_and_of_llama_cpp(
    query: str, key: str, config: dict[str, Any]
) -> None:
    run = observed("llama")
    tensors = {}
    for layer, live in enumerate(run.found):
        for name, weight in ((query, weight_of(live, "query")), (key, weight_of(live, "key"))):
            # half: (first dimensions, second dimensions); interleaved: pair by pair
            pairs = weight.unflatten(1, (2, -1)).transpose(1, 2)
            tensors[name.format(layer) + ".weight"] = pairs.reshape(-1, weight.shape[-1])
    found, _ = layouts({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config)
    for layout, live in zip(found, run.found, strict=True):
        assert mismatch(layout.form(tensors), run.seen[live.layout.name]) < ANGLES


def test_the_defaults_are_those_of_transformers() -> None:
    from tests.coverage.publish import DEFAULTS, config_defaults

    stored = json.loads(DEFAULTS.read_text())
    now = {name: {k: v for k, v in one.items() if v} for name, one in config_defaults().items()}
    assert stored == json.loads(json.dumps(now))


def test_a_composite_config_that_leaves_its_defaults_out_is_completed() -> None:
    rows, config = 8 * 64, {"text_config": {"model_type": "clip_text_model"}}
    names = ("text_model.encoder.layers.0.self_attn.q_proj.weight",) * 2
    shapes = {names[0]: (rows, rows), names[1].replace("q_", "k_"): (rows, rows)}
    (found,), _ = layouts(shapes, config)
    assert (found.heads, found.head_dim, found.family) == (8, 64, "clip_text_model")


def test_an_unknown_family_is_an_error_that_lists_its_names() -> None:
    shapes = {f"towers.{k}.mixer.gate.weight": (4, 4) for k in range(30)}
    with pytest.raises(LocaterError, match=r"towers\.#\.mixer\.gate\.weight\.\nhint: name them"):
        layouts(shapes, {})
    many = {f"{chr(97 + k)}.gate.weight": (4, 4) for k in range(26)}
    with pytest.raises(LocaterError, match=r"x\.gate\.weight, …\."):
        layouts(many, {})
    with pytest.raises(LocaterError, match=r"\(none\)"):
        layouts({}, {})


def test_one_recipe_reads_an_unknown_family() -> None:
    shapes = {"towers.3.mix.both.weight": (24, 8), "towers.3.mix.both.bias": (24,)}
    mine = Recipe(family="mine", query="both", packing="grouped", temperature=lambda *_: 7.0)
    (found,), skipped = layouts(shapes, {"heads": 2}, recipes=(mine, *RECIPES))
    assert (found.family, found.layer, found.heads, found.head_dim) == ("mine", 3, 2, 4)
    assert found.temperature == 7.0 and found.query.bias == "towers.3.mix.both.bias"
    assert not skipped


def skipped_reason(shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> str:
    found, skipped = layouts(shapes, config)
    assert not found
    (one,) = skipped
    assert isinstance(one, Skipped)
    return f"{one.name}: {one.reason}"


def pair(query: tuple[int, ...], key: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"h.0.attn.q_proj.weight": query, "h.0.attn.k_proj.weight": key}


def test_what_cannot_be_read_is_skipped_with_its_reason() -> None:
    reason = skipped_reason(pair((8, 8), (8, 8)), {})
    assert "h.0.attn: the number of heads is not known" in reason and "num_heads" in reason
    reason = skipped_reason(pair((8, 8), (8, 8)), {"num_heads": 3})
    assert "has 8 rows, which 3 heads do not divide" in reason
    reason = skipped_reason(pair((8, 8), (8, 6)), {"num_heads": 2})
    assert "queries read 8 dimensions and keys 6" in reason and "not square" in reason
    reason = skipped_reason(pair((32, 1), (32, 1)), {"num_heads": 2})
    assert "shape (32, 1)" in reason and "quantized" in reason
    reason = skipped_reason(pair((8, 8), (8, 8)), {"num_heads": 2, "head_dim": 8})
    assert "2 heads of 4 rows, but the config says head_dim = 8" in reason
    reason = skipped_reason(pair((12, 8), (8, 8)), {"num_heads": 3})
    assert "3 query heads cannot share 2 key heads" in reason


def test_eight_bit_weights_are_multiplied_with_their_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 12, generator=generator)
    names = pair((8, 12), (8, 12))
    for scale in (
        torch.tensor(0.1),
        torch.rand(1, generator=generator),
        torch.rand(8, generator=generator),
        torch.rand(8, 1, generator=generator),
        torch.rand(2, 3, generator=generator),
    ):
        whole = scale if scale.ndim != 1 or len(scale) == 1 else scale[:, None]
        if scale.shape == (2, 3):
            whole = torch.kron(scale, torch.ones(4, 4))
        stored = (weight / whole).to(torch.float8_e4m3fn)
        tensors = dict.fromkeys(names, stored)
        tensors |= {f"{name}_scale_inv": scale for name in names}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        (found,), skipped = layouts(shapes, {"num_heads": 2})
        assert not skipped and set(found.tensors) == set(tensors)
        unpacked = found.form(tensors).query.flatten(0, 1)
        torch.testing.assert_close(unpacked, stored.float() * whole)
        torch.testing.assert_close(unpacked, weight, rtol=0.07, atol=0.01)  # 3 bits of mantissa
    tensors |= {f"{name}_scale_inv": torch.ones(3, 5) for name in names}
    with pytest.raises(InputError, match=r"is \(8, 12\) and its scale \(3, 5\)\.\nhint: give one"):
        found.form(tensors)
    shapes = {**names, "h.0.attn.q_proj.SCB": (8,)}
    assert "q_proj is packed in 8 bits" in skipped_reason(shapes, {"num_heads": 2})


def test_a_scale_of_each_dimension_multiplies_queries_and_their_biases() -> None:
    shapes = {**pair((8, 8), (8, 8)), "h.0.attn.q_proj.bias": (8,), "h.0.attn.scaling": (4,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    (found,), _ = layouts(shapes, {"num_heads": 2, "model_type": "timesfm"})
    form = found.form(tensors)
    gain = torch.log1p(tensors["h.0.attn.scaling"].exp()) * math.log2(math.e)
    weight, bias = (tensors[f"h.0.attn.q_proj.{leaf}"] for leaf in ("weight", "bias"))
    torch.testing.assert_close(form.query, weight.view(2, 4, 8) * gain[:, None])
    torch.testing.assert_close(form.query_bias, bias.view(2, 4) * gain)
    torch.testing.assert_close(form.key, tensors["h.0.attn.k_proj.weight"].view(2, 4, 8))
    turning = {"num_heads": 2, "model_type": "timesfm2_5", "rope_theta": 1e4}
    (turned,), _ = layouts(shapes, turning)  # it scales what has turned
    assert turned.query.dimensions is None
    assert any("each dimension has a scale" in one for one in turned.caveats)


def test_convolutions_in_groups_are_matrices_of_blocks() -> None:
    shapes = {"h.0.attn.query.weight": (8, 4, 1), "h.0.attn.key.weight": (8, 2, 1)}
    tensors = {name: torch.rand(shape) + 1 for name, shape in shapes.items()}
    (found,), _ = layouts(shapes, {"num_heads": 2, "model_type": "squeezebert"})
    form, tokens = found.form(tensors), torch.rand(8, 3)
    for factor, name, groups in zip((form.query, form.key), shapes, (2, 4), strict=True):
        theirs = torch.nn.functional.conv1d(tokens, tensors[name], groups=groups)
        torch.testing.assert_close(factor.flatten(0, 1) @ tokens, theirs)


def test_gates_stand_before_the_queries_of_hrm() -> None:
    stored = torch.arange(32.0 * 8).view(32, 8)
    name = "H_module.layers.0.attn.gqkv_proj.weight"
    (found,), _ = layouts({name: (32, 8)}, {"num_heads": 2, "model_type": "hrm_text"})
    form = found.form({name: stored})
    assert torch.equal(form.query.flatten(0, 1), stored[8:16])
    assert torch.equal(form.key.flatten(0, 1), stored[16:24])


def test_fused_names_that_two_families_share_need_a_model_type() -> None:
    shapes = {"h.0.self_attention.query_key_value.weight": (24, 8)}
    reason = skipped_reason(shapes, {"num_heads": 2})
    assert "differ in what they store" in reason and "model_type is None" in reason
    found, _ = layouts(shapes, {"num_heads": 2, "model_type": "bloom"})
    assert found[0].position_bias == "alibi"


def test_an_attention_that_no_recipe_reads_is_skipped_and_named() -> None:
    shapes = {
        **pair((8, 8), (8, 8)),
        "h.1.attn.q_proj.qweight": (2, 8),
        "h.1.attn.k_proj.qweight": (2, 8),
        "h.2.linear_attn.in_proj_qkvz.weight": (8, 8),
        "h.2.mlp.up.weight": (8, 8),
    }
    found, skipped = layouts(shapes, {"num_heads": 2})
    assert [one.name for one in found] == ["h.0.attn"]
    assert [one.name for one in skipped] == ["h.1.attn", "h.2.linear_attn"]
    assert skipped[0].reason == "no recipe reads q_proj.qweight, k_proj.qweight"


def test_latent_attention_is_a_form_with_its_norms_at_their_root_mean_square() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    latent = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 2}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    config = transformers.DeepseekV3Config(**SHARED | latent | experts | {"v_head_dim": 4})
    model = shaken(transformers.AutoModel.from_config(config).double())
    found = find_attention(model)
    assert all("latent attention" in " ".join(one.layout.caveats) for one in found)
    module, form = model.layers[0].self_attn, found[0].form()
    down, gain = module.q_a_proj.weight, module.q_a_layernorm.weight
    inner = gain[:, None] * down * (8 / (down.square().sum() + 8e-6)).sqrt()
    query = (module.q_b_proj.weight @ inner).unflatten(0, (4, 6))
    down, gain = module.kv_a_proj_with_mqa.weight, module.kv_a_layernorm.weight
    inner = gain[:, None] * down[:6] * (6 / (down[:6].square().sum() + 6e-6)).sqrt()
    key = (module.kv_b_proj.weight @ inner).unflatten(0, (4, 6))[:, :2]
    torch.testing.assert_close(form.query[:, :4], query[:, 2:])
    torch.testing.assert_close(form.query[:, 4:], query[:, :2])
    torch.testing.assert_close(form.key[:, :4], down[6:].expand(4, -1, -1))
    torch.testing.assert_close(form.key[:, 4:], key)
    assert form.rotary is not None and form.rotary.frequencies.shape == (2,)
    assert form.rotary.layout == "interleaved"


def test_an_unnamed_model_type_is_read_by_its_names_and_says_so() -> None:
    config = {"num_heads": 2, "model_type": "brand_new", "rope_theta": 100.0}
    (found,), _ = layouts(pair((8, 8), (4, 8)), config)
    assert (found.family, found.kv_heads) == ("brand_new", 1)
    assert found.rotary is not None and found.rotary.base == 100.0
    assert "by its tensor names alone" in found.caveats[-1]


def test_debertas_content_term_is_exact_and_its_position_terms_are_a_caveat() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    config = transformers.DebertaV2Config(**SIZE, **relative, max_relative_positions=8)
    model = shaken(transformers.AutoModel.from_config(config, attn_implementation="eager"))
    found = find_attention(model)
    for table in ("rel_embeddings.weight", "query_proj.bias", "key_proj.bias"):
        for name, parameter in model.named_parameters():
            if name.endswith(table):  # then the position terms are zero
                parameter.data.zero_()
    with watched(found) as seen, torch.no_grad():
        model(input_ids=tokens())
    for live in found:
        assert live.layout.temperature == math.sqrt(3 * 8)
        assert "products of tokens with position embeddings" in live.layout.caveats[-1]
        assert mismatch(live.form(), seen[live.layout.name]) < ANGLES


def test_towers_of_a_composite_model_have_their_own_configs() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    text = {**SHARED, "model_type": "llama", "num_attention_heads": 8}
    vision = {**VISION, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    found, skipped = layouts(shapes_of(model), stored_config(model))
    assert found == [live.layout for live in find_attention(model)] and not skipped
    assert {(one.part, one.family, one.heads, one.kv_heads) for one in found} == {
        ("text", "llama", 8, 2),
        ("vision", "clip_vision_model", 4, 4),
    }


def test_layers_are_ordered_by_number() -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in (10, 2, 1):
        shapes |= {
            name.replace("h.0", f"h.{layer}"): size for name, size in pair((8, 8), (8, 8)).items()
        }
    found, _ = layouts(shapes, {"num_heads": 2})
    assert [one.layer for one in found] == [1, 2, 10]
