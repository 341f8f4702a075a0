"""A trial trains what it says, goes on where it stood, and claims no more than its seeds show."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from locater import ConfigError, InputError, LocaterError, Trial, TrialConfig, trial
from locater.cli import main
from locater.control.trial import TrialRun, next_token_loss
from locater.files import held
from locater.models.loading import Bytes, model_from_config, text_blocks, tokenizer_beside

GPT2 = {
    "model_type": "gpt2",
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "vocab_size": 256,
}
TINY = TrialConfig(methods=("none", "qk-norm"), learning_rates=(1e-3, 1e-2), steps=6, seeds=2,
                   tokens=8, batch=2)  # fmt: skip
TEXT = "".join(chr(97 + place * place % 23) for place in range(4000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trial")
    (path / "config.json").write_text(json.dumps({**GPT2, "n_positions": 16, "n_inner": 16}))
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def blocks() -> Tensor:
    return text_blocks(Bytes(), TEXT, tokens=8, blocks=100)


def fresh(folder: Path) -> Any:
    return model_from_config(folder / "config.json")


def stored(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.glob("*/run-*.json"))}


COMMAND = ["config.json", "--text", "text.txt", "--methods", "none,qk-norm,locater", "--seeds", "2",
           "--learning-rates", "1e-3,1e-2", "--steps", "25", "--tokens", "8",
           "--batch", "2"]  # fmt: skip


@pytest.mark.slow
def test_killed_and_resumed_it_leaves_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert main(["trial", *COMMAND, "--store", "whole", "--workers", "1"]) == 0
    command = [sys.executable, "-m", "locater.cli", "trial", *COMMAND, "--store", "killed"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not stored(tmp_path / "killed"):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = stored(tmp_path / "killed")
    assert main(["trial", *COMMAND, "--store", "killed", "--workers", "2"]) == 0
    whole = stored(tmp_path / "whole")
    assert 0 < len(before) < len(whole) == 12  # killed on its way
    assert stored(tmp_path / "killed") == whole


@pytest.mark.slow
def test_ray_leaves_the_same_runs(folder: Path, blocks: Tensor) -> None:
    here = trial(fresh(folder)(), blocks, TINY, fresh=fresh(folder), workers=1)
    there = trial(fresh(folder)(), blocks, TINY, fresh=fresh(folder), engine="ray", workers=2)
    assert there.runs == here.runs


def test_a_run_is_what_a_plain_loop_makes_of_it(folder: Path, blocks: Tensor) -> None:
    config = replace(TINY, methods=("none",), learning_rates=(1e-2,), seeds=1, clip=math.inf)
    (run,) = trial(fresh(folder)(), blocks, config, fresh=fresh(folder)).runs
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
        model = fresh(folder)().eval()  # no dropout
    train, rest = blocks[:-10], blocks[-10:]
    order = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for step in range(6):
        batch = train[torch.randint(len(train), (2,), generator=order)]
        logits = model(batch).logits[:, :-1].log_softmax(-1)
        loss = -logits.gather(-1, batch[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = config.rate_at(step, 1e-2)
        optimizer.step()
    with torch.no_grad():
        logits = model(rest).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), rest[:, 1:].flatten())
        # the lowest head of eager attention, of the rows that see two keys or more
        model.set_attn_implementation("eager")
        weights = model(rest, output_attentions=True).attentions[0].double()[:, :, 1:]
    assert run.loss == pytest.approx(loss.item(), abs=1e-4)
    entropy = (-torch.xlogy(weights, weights)).sum(-1).mean((0, 2)).min()
    most = torch.arange(2, 9).double().log().mean()
    assert run.entropy == pytest.approx((entropy / most).item(), abs=1e-4)


def test_a_learning_rate_that_is_too_high_is_a_result(folder: Path, blocks: Tensor) -> None:
    config = replace(TINY, methods=("none",), learning_rates=(1e-3, 1e30), seeds=1, clip=1e30)
    calm, wild = trial(fresh(folder)(), blocks, config, fresh=fresh(folder)).runs
    assert calm.loss is not None and calm.diverged is None
    assert wild.loss is None and wild.diverged is not None and wild.counted == wild.start
    (only,) = Trial(config, [calm, wild]).standings()
    assert only.diverged == 1 and only.learning_rate == 1e-3
    assert only.sensitivity == [pytest.approx((wild.start - calm.counted) / 2)]


def test_a_checkpoint_begins_with_its_weights_in_every_seed(folder: Path, blocks: Tensor) -> None:
    model = fresh(folder)()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = trial(model, blocks, replace(TINY, methods=("none",)))
    (start,) = {one.start for one in found.runs}
    assert len({one.loss for one in found.runs}) == 4
    assert start == pytest.approx(next_token_loss(model.eval(), blocks[-10:]).item(), abs=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_adapters_alone_are_trained(folder: Path, blocks: Tensor) -> None:
    config = replace(TINY, methods=("none", "locater"), lora=2, seeds=1)
    found = trial(fresh(folder)(), blocks, config)
    assert all(one.loss is not None and one.loss < one.start for one in found.runs)
    usual = TrialConfig(lora=2, learning_rates=(1e-2,), steps=3, seeds=1, batch=2)
    assert set(usual.methods) == {"none", "locater", "sigma-reparam"} < set(TrialConfig().methods)
    found = trial(fresh(folder)(), blocks, usual)  # its default methods train adapters
    assert len(found.runs) == 3 and all(one.loss is not None for one in found.runs)
    with pytest.raises(InputError, match=r"(?s)qk-clip cannot be tried.*leave it out of --methods"):
        trial(fresh(folder)(), blocks, replace(config, methods=("none", "qk-clip")))


@pytest.mark.parametrize("is_fresh", [True, False])
def test_another_model_never_gets_the_runs_of_this_one(
    is_fresh: bool, folder: Path, blocks: Tensor, tmp_path: Path
) -> None:
    """Numbers of heads, kinds of activations and scales of new weights show in no module's name."""
    config = replace(TINY, methods=("none",), learning_rates=(1e-3,), seeds=1, steps=1)
    model = fresh(folder)()

    def runs(settings: dict[str, Any]) -> Trial:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**GPT2, "n_positions": 16, "n_inner": 16, **settings}))
        make = model_from_config(path)
        same = make()
        same.load_state_dict(model.state_dict())
        given = {"fresh": make} if is_fresh else {}
        return trial(same, blocks, config, store=tmp_path / "runs", **given)

    first = runs({})
    assert runs({}) == first
    others: list[dict[str, Any]] = [{"n_head": 4}, {"scale_attn_weights": False}]
    others += [{"initializer_range": 0.1}] if is_fresh else []
    for settings in others:
        assert runs(settings).runs[0].loss != first.runs[0].loss
    assert len([*(tmp_path / "runs").iterdir()]) == 1 + len(others)


def test_a_model_is_left_as_it_was_and_its_length_is_the_blocks(
    folder: Path, blocks: Tensor
) -> None:
    model = fresh(folder)().train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    config = replace(TINY, methods=("none",), learning_rates=(1e-3,), seeds=1, tokens=64)
    assert trial(model, blocks, config).config.tokens == 8
    assert [module.training for module in model.modules()] == before
    with pytest.raises(InputError, match=r"(?s)lies on meta.*model.cpu\(\)"):
        trial(model.to("meta"), blocks, config)


# What is said


def made(losses: dict[str, list[list[float | None]]]) -> Trial:
    """A trial by method, learning rate and seed; None diverged; the loss at the start is 6."""
    rates, seeds = len(next(iter(losses.values()))), len(next(iter(losses.values()))[0])
    config = TrialConfig(
        methods=tuple(losses), seeds=seeds, learning_rates=tuple(10.0**-k for k in range(rates))
    )
    runs = [
        TrialRun(method, rate, seed, 6.0, value, 0.5, 1.0, None if value is not None else 3)
        for method, by_rate in losses.items()
        for rate, values in zip(config.learning_rates, by_rate, strict=True)
        for seed, value in enumerate(values)
    ]
    return Trial(config, runs)


def test_a_method_wins_where_every_pair_of_seeds_agrees() -> None:
    found = made({
        "none": [[None, None, 5.0], [3.02, 4.01, 5.03], [4.0, 5.0, 5.9]],
        "locater": [[4.0, 5.0, 5.9], [2.92, 3.90, 4.92], [3.9, 4.9, 5.8]],
    })  # fmt: skip
    said = found.sentence()  # seeds differ by 1, pairs by .1 ± .006
    assert said.startswith("Lowest loss: locater (3.913 ± 0.577; none is 0.107 ± 0.003 above)")
    first = found.standings()[0]
    assert first.method == "locater" and first.learning_rate == 0.1 and first.diverged == 0
    assert first.sensitivity == pytest.approx([(1.08 + 0.98) / 3, (1.1 + 1) / 3, (0.98 + 0.88) / 3])
    assert "end of what was tried" not in said


def test_seeds_that_disagree_leave_it_undecided() -> None:
    found = made({"none": [[3.0, 3.1, 3.2]], "qk-norm": [[3.1, 3.0, 3.1]]})
    assert "lowest loss: undecided, 3 seeds cannot tell" in found.sentence().lower()
    assert "two learning rates" in found.sentence()
    assert "1 is the end of what was tried" in found.sentence()
    single = made({"none": [[3.0], [9.0]], "qk-norm": [[2.0], [2.0]]})
    assert "undecided, 1 seed cannot tell qk-norm (2.000) from none" in single.sentence()


def test_only_runs_that_diverged_say_so() -> None:
    found = made({"none": [[None, None]], "qk-norm": [[None, None]]})
    assert found.sentence().startswith("Every run diverged: undecided")
    assert (
        made({"none": [[3.0, 3.2]]}).sentence()
        == "none alone was tried: its loss is 3.100 ± 0.100."
    )


def test_a_table_of_student_is_students() -> None:
    from scipy import stats

    from locater.control.trial import STUDENT

    expected = [stats.t(freedom).isf(0.025) for freedom in range(1, len(STUDENT))]
    assert STUDENT[1:] == pytest.approx(expected, abs=6e-4)


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("none", "magic")}, r"unknown method 'magic'.\nhint: choose one of: none, lo"),
        ({"methods": ("qk-clip:30",)}, "cannot read the settings of 'qk-clip:30'"),
        ({"methods": ()}, "methods must be some, each once, got none"),
        ({"learning_rates": (1e-3, 0.0)}, "learning rates must be positive, got 0.0"),
        ({"learning_rates": (1e-3, 1e-3)}, "learning_rates must be some, each once"),
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"clip": 0.0}, "clip must be positive"),
    ],
)
def test_settings_that_make_no_trial_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **change)


class Ahead(nn.Module):
    """Predicts what it sees: its attention looks at all tokens."""

    def __init__(self, *, is_causal: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.output = nn.Linear(8, 256)
        self.is_causal = is_causal

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.layer(self.embedding(ids), src_mask=mask if self.is_causal else None)
        return self.output(hidden)


def test_models_that_cannot_be_tried_are_refused_before_any_run(blocks: Tensor) -> None:
    config = replace(TINY, methods=("none",))
    with pytest.raises(InputError, match=r"Ahead sees the tokens that it is to predict"):
        trial(Ahead(), blocks, config)
    plain = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
    with pytest.raises(LocaterError, match=r"no recipe finds queries and keys"):
        trial(plain, blocks, config)
    with pytest.raises(InputError, match=r"the text holds 1 blocks of 8 tokens"):
        trial(Ahead(), blocks[:1], config)
    with pytest.raises(InputError, match=r"qk-norm cannot be tried on this model"):
        trial(Ahead(is_causal=True), blocks, TINY)
    assert len(trial(Ahead(is_causal=True), blocks, config).runs) == 4


def test_two_processes_in_one_folder_are_refused(
    folder: Path, blocks: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TINY, methods=("none",), seeds=1)
    first = trial(fresh(folder)(), blocks, config, fresh=fresh(folder), store=tmp_path)
    monkeypatch.setattr("locater.files.PATIENCE", 0.1)
    (inside,) = tmp_path.iterdir()
    with held(inside), pytest.raises(LocaterError, match="another process is training in"):
        trial(fresh(folder)(), blocks, config, fresh=fresh(folder), store=tmp_path)
    again = trial(fresh(folder)(), blocks, config, fresh=fresh(folder), store=tmp_path)
    assert again == first
    (inside / "run-0000.json").write_text("{}")  # never taken for a result
    heard: list[str] = []
    mended = trial(
        fresh(folder)(), blocks, config, fresh=fresh(folder), store=tmp_path, say=heard.append
    )
    assert mended == first and "is not what was stored" in heard[0]


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("", [], "the text holds 0 blocks of 8 tokens"),
        ("short", [], "the text holds 0 blocks of 8 tokens"),
        (TEXT, ["--methods", "none,magic"], "unknown method 'magic'"),
        (TEXT, ["--learning-rates", "1e-3,-1"], "learning rates must be positive, got -1.0"),
        (TEXT, ["--learning-rates", "fast"], "'fast' is no learning rate"),
        (TEXT, ["--out", "picture.txt"], "cannot write a figure as 'picture.txt'"),
    ],
)
def test_the_command_says_what_is_wrong(
    text: str,
    more: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(text)
    shutil.copy(folder / "config.json", tmp_path)
    assert main(["trial", *COMMAND, *more]) == 1
    error = capsys.readouterr().err
    assert message in error and "hint: " in error


def test_the_command_writes_a_picture_and_one_sentence(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    small = ["--steps", "2", "--seeds", "1", "--methods", "none,qk-clip:max_logit=30"]
    command = ["trial", *COMMAND, *small, "--store", str(tmp_path)]
    assert main([*command, "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert "qk-clip:max_logit=30" in said and "undecided" in said.splitlines()[-1]
    page = (tmp_path / "page.html").read_text()
    assert "lowest head's entropy" in page and "undecided" in page and "sensitivity" in page
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["runs"]) == 4 and data["sentence"].startswith("Lowest loss")


def test_a_tokenizer_beside_the_config_is_the_one_that_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert tokenizer_beside(folder / "config.json") is None
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    words = Tokenizer(
        models.WordLevel({"[UNK]": 0, TEXT.split()[0]: 1, "other": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    found = tokenizer_beside(tmp_path / "config.json")
    assert found is not None and found(TEXT.split()[0])["input_ids"] == [1]
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert main(["trial", *COMMAND]) == 1
