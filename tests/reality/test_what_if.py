"""What-ifs against doing it: to the model itself, or to tokens whose law is known."""

import json
import math
import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import built
from torch import Tensor

from locater import ConfigError, InputError, LocaterError, QKForm, Rotary, TokenProcess
from locater.cli import main
from locater.models.live import find_attention
from locater.models.loading import load_model, read_text, text_blocks
from locater.models.positions import stretched
from locater.probe.samples import collect
from locater.reality.what_if import (
    Change,
    LayerMoments,
    Moments,
    change_bar,
    look,
    moments,
    what_if,
)
from locater.report.reality_view import save_what_if

HEAD, MODEL, TOKENS = 8, 16, 12


def a_form(*, rotary: bool = True) -> QKForm:
    generator = torch.Generator().manual_seed(5)
    query, key = torch.randn(2, 2, HEAD, MODEL, generator=generator, dtype=torch.float64) / 2
    biases = torch.randn(2, 2, HEAD, generator=generator, dtype=torch.float64)
    turn = Rotary.from_base(HEAD, base=100.0) if rotary else None
    return QKForm(query, key, math.sqrt(HEAD), biases[0], biases[1], turn)


def tokens_of(process: TokenProcess, count: int, seed: int) -> Tensor:
    return process.sample(count, generator=torch.Generator().manual_seed(seed))


def a_process(tokens: int = TOKENS) -> TokenProcess:
    generator = torch.Generator().manual_seed(6)
    root = torch.randn(MODEL, MODEL, generator=generator, dtype=torch.float64) / 4
    mean = torch.randn(MODEL, generator=generator, dtype=torch.float64)
    process = TokenProcess.autoregressive(tokens, 0.6, covariance=root @ root.mT)
    return replace(process, mean=0.5 * mean.expand(tokens, -1), is_known=True)


def rows_of(form: QKForm, tokens: Tensor) -> Tensor:
    """The last query's logits by definition, heads first: every vector turned by its position."""
    query = torch.einsum("nm,ahm->anh", tokens[:, -1], form.query)
    key = torch.einsum("ntm,ahm->anth", tokens, form.key)
    query = query if form.query_bias is None else query + form.query_bias[:, None]
    key = key if form.key_bias is None else key + form.key_bias[:, None, None]
    if form.rotary is not None:
        place = torch.arange(tokens.shape[1], dtype=torch.float64)
        phases = form.rotary.phases(place)
        key, query = form.rotary.turn(key, phases), form.rotary.turn(query, phases[-1])
    return torch.einsum("anth,anh->ant", key, query) / form.temperature


BASE, CONTEXT, BLOCKS = 100.0, 64, 6000
KNOWN = Moments(
    model="?",
    blocks=BLOCKS,
    context=CONTEXT,
    layers=(LayerMoments.of(a_form(), tokens_of(a_process(), BLOCKS, 1), base=BASE),),
)


def scaled(form: QKForm, factor: float) -> QKForm:
    assert form.query_bias is not None
    return replace(form, query=factor * form.query, query_bias=factor * form.query_bias)


def turned(form: QKForm, kind: str, factor: float) -> QKForm:
    assert form.rotary is not None
    frequencies, magnitude = stretched(
        form.rotary.frequencies, kind, factor, base=BASE, original=CONTEXT
    )
    return replace(form, rotary=Rotary(frequencies), temperature=form.temperature / magnitude**2)


DONE: dict[str, tuple[Change, Any]] = {
    "nothing": (Change(), lambda form: form),
    "half the scale": (Change(scale=0.5), lambda form: scaled(form, 0.5)),
    "twice the scale": (Change(scale=2.0), lambda form: scaled(form, 2.0)),
    "colder": (
        Change(temperature=0.8),
        lambda form: replace(form, temperature=0.8 * form.temperature),
    ),
    "no query bias": (Change(query_bias=False), lambda form: replace(form, query_bias=None)),
    "no rotation": (Change(rope_scaling="off"), lambda form: replace(form, rotary=None)),
    "another base": (
        Change(rope_scaling="base:10000"),
        lambda form: replace(form, rotary=Rotary.from_base(HEAD, base=10_000.0)),
    ),
    "linear": (
        Change(rope_scaling="linear:4"),
        lambda form: replace(form, rotary=Rotary(form.rotary.frequencies / 4)),
    ),
    "ntk": (Change(rope_scaling="ntk:4"), lambda form: turned(form, "ntk", 4)),
    "yarn": (Change(rope_scaling="yarn:4"), lambda form: turned(form, "yarn", 4)),
}


@pytest.mark.parametrize("name", DONE)
def test_a_change_is_predicted_as_it_is_done(name: str) -> None:
    """On Gaussian tokens, to the errors of drawing and of estimating the moments."""
    change, do = DONE[name]
    truth = rows_of(do(a_form()), tokens_of(a_process(), 20_000, 2))
    found = what_if(KNOWN, change, draws=4000)
    for head, row in enumerate(found.rows):
        seen = look(truth[head])
        error = math.hypot(row["entropy_error_after"], seen.entropy_error)
        # 6,000 blocks leave about √(1/6000) of each moment open, worth .01 nats here
        assert abs(row["entropy_after"] - seen.entropy) < 5 * error + 0.02, (head, seen)
        assert abs(row["sink_mass_after"] - seen.sink_mass) < 0.02
        assert abs(row["own_mass_after"] - seen.own_mass) < 0.02
        assert abs(row["largest_after"] / seen.largest - 1) < 0.15


def test_changes_change_something() -> None:
    """What a test of equality would not see: none of the changes is a name for nothing."""
    for name, (change, _) in DONE.items():
        (first, _) = what_if(KNOWN, change, draws=200).rows
        moved = abs(first["entropy_after"] - first["entropy_before"])
        assert (moved > 0.001) == (name != "nothing"), name


def test_longer_sequences_follow_from_short_ones() -> None:
    """A stationary process is continued: entropy at four times the length, never seen."""
    long = 4 * TOKENS
    truth = rows_of(a_form(), tokens_of(a_process(long), 8000, 3))
    for head, row in enumerate(what_if(KNOWN, Change(tokens=long), draws=3000).rows):
        seen = look(truth[head])
        assert abs(row["entropy_after"] - seen.entropy) < 0.05
        assert abs(row["distance_after"] - seen.distance) < 0.05 * long
        # copying the short one would be off by several times as much
        assert abs(row["entropy_before"] - seen.entropy) > 0.2


def test_a_continued_process_keeps_its_first_tokens_and_is_a_process() -> None:
    process = a_process()
    kernel = process.kernel.clone()
    kernel[0] = kernel[:, 0] = 0
    kernel[0, 0] = 9.0  # a first token unlike the others
    mean = process.mean
    assert mean is not None
    mean = mean.clone()
    mean[0] = 7.0
    longer = replace(process, kernel=kernel, mean=mean, is_known=False).continued(50)
    assert longer.kernel[0, 0] == 9 and bool((longer.kernel[0, 1:].abs() < 1e-12).all())
    assert longer.mean is not None and bool((longer.mean[0] == 7).all())
    assert torch.allclose(longer.mean[-1], mean[-3:].mean(0))
    assert torch.linalg.eigvalsh(longer.kernel)[0] > -1e-10
    assert torch.allclose(longer.kernel[20, 21:24], torch.tensor([0.6, 0.36, 0.216]).double())
    assert longer.continued(10).tokens == 10


def test_a_file_gives_the_same_numbers_as_the_model(samples: Path, tmp_path: Path) -> None:
    """Rotary, grouped keys: the heads' own logits follow from the moments' forms exactly."""
    model, tokenizer = load_model(str(samples / "model"))
    blocks = text_blocks(tokenizer, read_text(samples / "text.txt"), tokens=16, blocks=60)
    found = moments(model, blocks, name="tiny")
    path = found.save(tmp_path / "moments.safetensors")
    again = Moments.load(path)
    assert (again.model, again.blocks, again.context) == ("tiny", len(blocks), found.context)
    for layer, stored in zip(found.layers, again.layers, strict=True):
        assert torch.equal(layer.covariance.float(), stored.covariance)
        assert (layer.name, layer.temperature, layer.base) == (
            stored.name, stored.temperature, stored.base
        )  # fmt: skip
    change = Change(scale=0.5)
    first, second = (what_if(one, change, draws=50).rows for one in (found, again))
    for one, other in zip(first, second, strict=True):
        assert one["entropy_after"] == pytest.approx(other["entropy_after"], abs=1e-5)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be read as moments"):
        Moments.load(path)


def test_the_forms_of_moments_have_the_models_logits(samples: Path) -> None:
    model, tokenizer = load_model(str(samples / "model"))
    blocks = text_blocks(tokenizer, read_text(samples / "text.txt"), tokens=16, blocks=40)
    (sample, *_) = collect(model, find_attention(model), blocks, keep=len(blocks))
    form = sample.attention.form().to(torch.float64)
    ours = rows_of(form, sample.inputs.double()).movedim(1, 0)
    gap = (ours - ours.mean(-1, keepdim=True)) - (
        sample.logits - sample.logits.mean(-1, keepdim=True)
    )
    assert gap.abs().max() < 1e-4 * sample.logits.std()


def test_the_commands_go_from_a_text_to_a_table(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = tmp_path / "moments.safetensors", str(samples / "text.txt")
    given = ["--text", text, "--tokens", "12", "--blocks", "40"]
    assert main(["moments", str(samples / "model"), *given, "--out", str(file)]) == 0
    assert "MB" in capsys.readouterr().err
    assert main(["what-if", str(file), "--tokens", "48", "--draws", "20"]) == 0
    said = capsys.readouterr().out
    assert "12 → 48 tokens" in said and "nothing was run" in said
    assert main(["what-if", str(file), "--scale", "0.5", "--draws", "20", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["change"]["scale"] == 0.5 and data["heads"]
    assert main(["what-if", str(samples / "model"), "--scale", "2"]) == 1
    assert "give --text FILE" in capsys.readouterr().err


def a_peft_model(kind: str, folder: Path, **settings: Any) -> tuple[Any, Any]:
    """A tiny model of normal weights, and the same with an adapter that PEFT wrote to `folder`."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

    ends = {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 0}
    generator = torch.Generator().manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "gpt2":
            model: Any = GPT2Model(GPT2Config(**ends, n_embd=64, n_layer=2, n_head=4))
        else:
            sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
                     "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
            model = LlamaModel(LlamaConfig(vocab_size=11, **sizes))
        for parameter in model.parameters():
            parameter.data.add_(0.12 * torch.randn(parameter.shape, generator=generator))
        model.config.use_cache = False
        before = deepcopy(model).eval()
        learner: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **settings))
        for name, parameter in learner.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
        learner.save_pretrained(folder)
        return before, learner.merge_and_unload().eval()


class OnVectors(torch.nn.Module):
    """A model that reads tokens' vectors in place of ids."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, vectors: Tensor) -> Any:
        return self.inner(inputs_embeds=vectors)


QK = {"llama": r"layers\.0\.self_attn\.[qk]_proj", "gpt2": r"h\.0\.attn\.c_attn"}


@pytest.mark.parametrize("kind", QK)
def test_an_adapter_is_predicted_as_peft_puts_it_on(kind: str, tmp_path: Path) -> None:
    """On queries and keys of one layer, Gaussian tokens: to the errors of drawing and moments."""
    before, after = map(OnVectors, a_peft_model(kind, tmp_path, target_modules=QK[kind]))
    process = TokenProcess.autoregressive(TOKENS, 0.6)
    tokens, others = (
        process.sample(1500, model=64, generator=torch.Generator().manual_seed(seed)).float()
        for seed in (1, 2)
    )
    known = moments(before, tokens, name="tiny", adapter=tmp_path, batch=500)
    assert [layer.layer for layer in known.adapted] == [0]
    found = what_if(known, Change(adapter=str(tmp_path)), draws=3000)
    truth = [
        collect(model, find_attention(model)[:1], others, keep=0, batch=500)[0].logits.double()
        for model in (before, after)
    ]
    first, second = found.rows[:4], found.rows[4:]
    for head, row in enumerate(first):
        was, now = (look(logits[:, head]) for logits in truth)
        error = math.hypot(row["entropy_error_before"], row["entropy_error_after"],
                           was.entropy_error, now.entropy_error)  # fmt: skip
        change, bound = now.entropy - was.entropy, 5 * error + 0.02  # as above
        assert abs(change) > 4 * bound  # "nothing changes" would be off by this
        assert abs(row["entropy_change"] - change) < bound, (head, change)
        assert abs(row["own_mass_after"] - now.own_mass) < 0.03
    assert all(row["entropy_change"] == 0 for row in second)  # its own weights stay
    assert "as they are without the adapter" in found.caveats[0]
    halved = what_if(known, Change(adapter=str(tmp_path), scale=0.5), draws=100).rows[0]
    assert halved["entropy_after"] > first[0]["entropy_after"]  # a change on top of the adapter


def test_an_adapter_that_does_more_or_does_not_fit_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "more"
    model, _ = a_peft_model("llama", folder, target_modules="all-linear")
    blocks = torch.randint(11, (40, TOKENS), generator=torch.Generator().manual_seed(1))
    known = moments(model, blocks, adapter=folder)
    assert len(known.adapted) == 2
    said = " ".join(known.caveats)
    assert "10 other weights (down_proj, gate_proj, o_proj, up_proj, v_proj)" in said

    again = Moments.load(known.save(tmp_path / "moments.safetensors"))
    change = Change(adapter=str(folder))
    assert again.caveats == known.caveats and again.adapter == known.adapter
    for one, other in zip(known.adapted, again.adapted, strict=True):
        assert torch.equal(one.covariance.float(), other.covariance)
    assert all(row["entropy_change"] != 0 for row in what_if(again, change, draws=50).rows)
    bare = replace(known, adapter="", adapted=(), caveats=())
    for wrong, adapter in ((bare, str(folder)), (known, "another")):
        with pytest.raises(InputError, match="do not tell what the adapter"):
            what_if(wrong, Change(adapter=adapter), draws=50)
    assert what_if(known, Change(), draws=50).rows[0]["entropy_change"] == 0  # not asked for

    a_peft_model("llama", tmp_path / "values", target_modules=["v_proj"])
    with pytest.raises(InputError, match=r"changes no queries or keys that .* it changes v_proj"):
        moments(model, blocks, adapter=tmp_path / "values")
    wide = {name: torch.cat((part, part), -1) for name, part in
            load_file(folder / "adapter_model.safetensors").items()}  # fmt: skip
    save_file(wide, folder / "adapter_model.safetensors")
    with pytest.raises(LocaterError, match=r"is \(\d+, 64\), and the adapter's factors are"):
        moments(model, blocks, adapter=folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(LocaterError, match="holds no checkpoint; it holds"):
        moments(model, blocks, adapter=folder)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(LocaterError, match="holds no LoRA adapter"):
        moments(model, blocks, adapter=tmp_path / "model")
    with pytest.raises(LocaterError, match="nowhere"):
        moments(model, blocks, adapter=tmp_path / "nowhere")


def test_mistakes_are_explained() -> None:
    for wrong in ({"rope_scaling": "yarn"}, {"rope_scaling": "spin:2"}, {"scale": -1.0},
                  {"tokens": 1}, {"temperature": 0.0}):  # fmt: skip
        with pytest.raises(ConfigError):
            Change(**wrong)  # type: ignore[arg-type]


def test_changes_that_a_model_would_not_feel_are_refused(tmp_path: Path) -> None:
    still = replace(KNOWN, layers=(replace(KNOWN.layers[0], frequencies=None),))
    with pytest.raises(InputError, match=r"(?s)nothing turns in.*leave it out"):
        what_if(still, Change(rope_scaling="linear:4"), draws=4)
    normed = replace(KNOWN, layers=(replace(KNOWN.layers[0], normalized=True),))
    back = Moments.load(normed.save(tmp_path / "normed.safetensors"))
    with pytest.raises(InputError, match=r"(?s)scale of W_QK changes nothing.*temperature 0.5"):
        what_if(back, Change(scale=2.0), draws=4)
    assert what_if(back, Change(temperature=0.5), draws=4).rows


@pytest.mark.parametrize("name", ["bloom", "qwen3"])
def test_biases_go_on_past_the_blocks_and_norms_are_told(name: str) -> None:
    """A bias by distance at another length is that of the model's own attention there."""
    model = built(name).double().eval()
    blocks = torch.randint(2, 50, (40, 8), generator=torch.Generator().manual_seed(0))
    known = moments(model, blocks)
    assert all(layer.normalized == (name == "qwen3") for layer in known.layers)
    assert what_if(known, Change(tokens=20), draws=4).tokens == 20
    if name == "bloom":
        form, process = known.layers[0].head(1)
        (attention,) = find_attention(model, layers=r"\.0\.")
        wanted = attention.form(distances=20).distance_bias
        assert wanted is not None and form.distance_bias is not None
        torch.testing.assert_close(form.distance_bias[:20], wanted[1].double())
        with pytest.raises(InputError, match=r"(?s)of 8,192 distances.*ask for 8,192 tokens"):
            Change(tokens=9000).of(form, process)


def test_nine_of_ten_real_changes_lie_within_the_bar() -> None:
    """Over what was done to real models; the bar is neither empty nor a wall."""
    within, wide = [], []
    for path in (Path(__file__).parents[2] / "results/interventions").glob("*.json"):
        for layer in json.loads(path.read_text())["layers"].values():
            for row in layer:
                ours, real = row["moments"]["entropy"], row["measured"]["entropy"]
                within.append(abs(ours - real) <= change_bar(ours))
                wide.append(abs(ours - real) <= change_bar(ours) / 2)
    assert len(within) > 500
    assert 0.87 <= sum(within) / len(within) <= 0.95
    assert sum(wide) / len(wide) < 0.85


def test_a_figure_says_every_change(tmp_path: Path) -> None:
    change = Change(scale=0.5, query_bias=False, centered_keys=True)
    found = what_if(KNOWN, change, draws=4).to_dict()
    page = save_what_if(found, tmp_path / "page.html", known=KNOWN.blocks).read_text()
    assert "?: scale 0.5, no query bias, centered keys" in page


def test_longer_texts_with_learned_places_are_doubted() -> None:
    still = replace(KNOWN.layers[0], frequencies=None)
    learned = replace(KNOWN, layers=(still,))
    (caveat,) = what_if(learned, Change(tokens=24), draws=4).caveats
    assert "learned vectors" in caveat
    assert not what_if(learned, Change(scale=0.5), draws=4).caveats
    assert not what_if(KNOWN, Change(tokens=24), draws=4).caveats
