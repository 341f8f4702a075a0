"""A run that is killed, cut or damaged goes on as if nothing had been; training really trains."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from locater.audit import audit_model, audit_timeline
from locater.core.penalty import LocAteRConfig
from locater.errors import ConfigError, InputError, LocaterError
from locater.files import held
from locater.paper.lab.batches import load_material
from locater.paper.lab.model import (
    STABILIZERS,
    StabilizerName,
    Transformer,
    TransformerConfig,
    apply_stabilizer,
)
from locater.paper.lab.run import DivergedError, Run, RunFolder, rounded
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.text import load_corpus
from locater.paper.lab.train import Meter, RoundedProducts, load_trained, train

WORDS = ("attention", "looks", "at", "late", "tokens", "and", "early", "ones", "of", "the", "text")
SMALL = TrainConfig(
    corpus="text.txt",
    dim=8,
    layers=2,
    tokens=8,
    batch=4,
    steps=12,
    learning_rate=1e-2,
    measure_every=3,
    predict_every=2,
    scale_strength=0.1,
    mean_strength=1.0,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences in which a word decides the next but one: something for attention to learn."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(WORDS), (400, 12), generator=generator).tolist()
    path.write_text("\n".join(" ".join(WORDS[word] for word in line) for line in draws) + "\n")
    return path


def finish(config: TrainConfig, out: Path, text: Path, every: int = 4) -> Run:
    return train(config, out, data=str(text), checkpoint_every=every, trackers=())


def contents(out: Path) -> dict[str, bytes]:
    """What has to be the same to the last bit: metrics, weights, optimizer."""
    files = sorted([out / "metrics.jsonl", *out.glob("checkpoints/*/*.safetensors")])
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


KINDS = {
    "as it is": {},
    "running covariance": {"covariance": "running"},
    "sigma-reparam": {"scale_strength": 0.0, "mean_strength": 0.0, "stabilizer": "sigma-reparam"},
    "masked": {"task": "masked"},
    "bf16": {"precision": "bf16"},
    "modern": {"heads": 4, "kv_heads": 2, "positions": "rotary", "norm": "pre", "norm_kind": "rms",
               "activation": "swiglu", "bias": False, "tied": True, "warmup": 3,
               "schedule": "cosine", "clip": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_cut_after_a_checkpoint_goes_on_bit_by_bit(
    kind: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(SMALL, **KINDS[kind], predict_every=2 if kind == "as it is" else 99)
    finish(config, tmp_path / "whole", text)

    def stop(progress: object) -> None:
        if progress.step == 7:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            config, tmp_path / "cut", data=str(text), checkpoint_every=4, trackers=(), report=stop
        )
    assert [p.name for p in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-00000004"]
    said: list[str] = []
    train(
        config, tmp_path / "cut", data=str(text), checkpoint_every=4, trackers=(), say=said.append
    )
    assert said == ["going on from step 4 of 12"]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_rounded_products_are_those_of_autocast() -> None:
    """Of whole numbers every sum is exact, so that nothing but roundings can tell them apart."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 16), (16, 16), (16,), (2, 4, 16))
    hidden, weight, bias, up = (
        torch.randint(-40, 40, shape, generator=generator).float() for shape in shapes
    )
    hidden[0] += 1 / 1024  # not to be had in bfloat16

    def found(mode: Any) -> list[torch.Tensor]:
        parts = [part.clone().requires_grad_() for part in (hidden, weight, bias)]
        with mode:
            out = functional.linear(*parts)
            mixed = functional.scaled_dot_product_attention(out * 0, out * 0, out)
        return [out.float(), mixed.float(), *torch.autograd.grad((out * up).sum(), parts)]

    ours = found(RoundedProducts(torch.bfloat16))
    theirs = found(torch.autocast("cpu", torch.bfloat16))
    plain = functional.linear(hidden, weight, bias)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not torch.equal(ours[0], plain)


@pytest.mark.parametrize("stabilizer", STABILIZERS)
def test_rounded_products_round_where_autocast_does(stabilizer: StabilizerName) -> None:
    """What enters and leaves every module has the same dtype, whatever holds attention."""
    config = TransformerConfig(vocabulary=30, dim=8, heads=2, layers=2, length=6)
    tokens = torch.randint(30, (2, 6), generator=torch.Generator().manual_seed(0))

    def seen(mode: Any) -> tuple[list[Any], torch.Tensor]:
        model = Transformer(config, torch.Generator().manual_seed(1)).eval()
        apply_stabilizer(model, stabilizer, max_logit=0.1, learning_rate=1e-3)
        kinds: list[Any] = []
        for module in model.modules():
            module.register_forward_hook(
                lambda one, given, out: kinds.append(
                    (type(one).__name__, *(part.dtype for part in (*given, out)))
                )
            )
        with torch.autocast("cpu", torch.bfloat16), mode:
            out = model(tokens)
        return kinds, out

    ours, autocast = seen(RoundedProducts(torch.bfloat16)), seen(nullcontext())
    assert ours[0] == autocast[0]
    assert sum(out == torch.bfloat16 for *_, out in ours[0]) >= 12  # six products in each layer
    # a few roundings apart: of two layers, each with five in a row, none larger than its value
    gap = (ours[1] - autocast[1]).abs().max() / autocast[1].abs().max()
    assert gap <= 10 * torch.finfo(torch.bfloat16).eps


def test_another_seed_is_another_run(text: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        finish(replace(SMALL, steps=2, seed=seed), tmp_path / str(seed), text)
    assert contents(tmp_path / "0") != contents(tmp_path / "1")


PROGRAM = """
import json, sys
from pathlib import Path
import torch
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.train import train
torch.set_num_threads(1)
config = TrainConfig.from_dict(json.loads(sys.argv[1]))
report = lambda progress: print(progress.step, flush=True)
train(config, Path(sys.argv[2]), data=sys.argv[3], checkpoint_every=5, trackers=(), report=report)
"""


def test_a_killed_process_leaves_a_run_that_goes_on_bit_by_bit(text: Path, tmp_path: Path) -> None:
    config = replace(SMALL, steps=24, predict_every=99)
    finish(config, tmp_path / "whole", text, every=5)
    arguments = [json.dumps(config.changes()), str(tmp_path / "killed"), str(text)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:  # somewhere in the middle, at no moment in particular
        if int(line) >= 8:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    assert Run.load(tmp_path / "killed").final is None
    finish(config, tmp_path / "killed", text, every=5)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_the_last_two_checkpoints_are_kept_and_a_finished_run_is_not_repeated(
    text: Path, tmp_path: Path
) -> None:
    run = finish(SMALL, tmp_path, text)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000012"]
    before = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    again = finish(SMALL, tmp_path, text)
    assert again.records == run.records
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == before


SHORT = replace(SMALL, layers=1, steps=6, measure_every=2, dim=4, predict_every=99)


@pytest.fixture(scope="module")
def short(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to copy."""
    folder = tmp_path_factory.mktemp("short")
    finish(SHORT, folder, text, every=2)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    name: str, harm: str, short: Path, text: Path, tmp_path: Path
) -> None:
    config = SHORT
    shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    whole = contents(tmp_path)
    damaged = tmp_path / "checkpoints" / "step-00000006" / name
    data = bytearray(damaged.read_bytes())
    if harm == "cut":
        damaged.write_bytes(data[: len(data) // 2])
    elif harm == "flipped":
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
    else:
        damaged.unlink()
    metrics = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(metrics[:-1]))  # not known to be finished
    said: list[str] = []
    train(config, tmp_path, data=str(text), checkpoint_every=2, trackers=(), say=said.append)
    if harm == "flipped" and name == "manifest.json" and len(said) == 1:
        pytest.fail("a manifest whose bytes changed was believed")
    assert said[0].startswith("checkpoint step-00000006 is damaged")
    assert said[-1] == "going on from step 4 of 6"
    assert contents(tmp_path) == whole


def test_a_folder_of_another_setting_is_refused_and_names_it(text: Path, tmp_path: Path) -> None:
    finish(replace(SMALL, steps=2), tmp_path, text)
    with pytest.raises(InputError, match=r"holds a run with learning_rate = 0\.01, not 0\.02"):
        finish(replace(SMALL, steps=2, learning_rate=0.02), tmp_path, text)


def test_a_folder_trained_on_another_text_is_refused(text: Path, tmp_path: Path) -> None:
    finish(replace(SMALL, steps=2), tmp_path / "run", text)
    (tmp_path / "text.txt").write_text(text.read_text().replace("late", "first"))
    with pytest.raises(InputError, match="was trained on another text"):
        finish(replace(SMALL, steps=2), tmp_path / "run", tmp_path / "text.txt")


def test_a_folder_with_other_things_in_it_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="is not empty and holds no run"):
        finish(SMALL, tmp_path, text)


def test_a_loss_that_is_no_number_stops_and_names_the_layer(text: Path, tmp_path: Path) -> None:
    config = replace(SMALL, scale_strength=0.0, mean_strength=0.0, learning_rate=1e36, norm="none")
    with pytest.raises(
        DivergedError, match=r"NaN or infinite at step \d+; the first such output is layers\.\d\."
    ):
        finish(config, tmp_path, text, every=1)
    run = Run.load(tmp_path)
    assert run.has_diverged
    assert run.final is not None and run.final["layer"].startswith("layers.")
    # the weights that the failed step began with are no good, those before them are
    steps = [int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").iterdir()]
    assert all(step < run.final["step"] for step in steps)


def test_a_measurement_that_is_no_number_ends_the_run_too(text: Path, tmp_path: Path) -> None:
    config = replace(SMALL, scale_strength=0.0, mean_strength=0.0, learning_rate=1e36, norm="none")
    for steps, every in ((1, 5), (6, 1)):  # at the last step; at the first of several
        out = tmp_path / str(steps)
        with pytest.raises(DivergedError, match="NaN or infinite at step 1"):
            finish(replace(config, steps=steps, measure_every=every), out, text)
        assert Run.load(out).has_diverged


def test_a_torn_line_of_metrics_is_made_again(text: Path, tmp_path: Path) -> None:
    config = replace(SMALL, steps=6)
    finish(config, tmp_path / "whole", text)
    finish(config, tmp_path / "torn", text)
    metrics = tmp_path / "torn" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-9])  # as a full disk leaves it
    assert Run.load(tmp_path / "torn").final is None
    finish(config, tmp_path / "torn", text)
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")


def test_a_run_killed_before_its_settings_were_there_begins_again(
    text: Path, tmp_path: Path
) -> None:
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / ".config.json.ab12").write_text('{"st')
    assert finish(replace(SMALL, steps=2), tmp_path, text).final is not None


def test_two_processes_do_not_train_in_one_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locater.files.PATIENCE", 0.2)
    message = r"another process is training in .*\nhint: wait for it"
    with held(tmp_path), pytest.raises(LocaterError, match=message):
        finish(replace(SMALL, steps=2), tmp_path, text)
    assert finish(replace(SMALL, steps=2), tmp_path, text).final is not None


def test_settings_that_make_no_model_leave_no_folder(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dim"):
        finish(replace(SMALL, dim=9), tmp_path / "run", text)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="checkpoint_every must be 1 or more"):
        finish(SMALL, tmp_path / "run", text, every=0)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InputError, match="is a file"):
        finish(SMALL, tmp_path / "file", text)


def test_the_random_state_of_the_caller_is_left_alone(text: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    finish(replace(SMALL, steps=2), tmp_path, text)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_that_no_text_can_fill_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no block of 9000"):
        finish(replace(SMALL, tokens=9_000), tmp_path, text)


def test_another_text_than_the_settings_name_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ask for the text 'wikitext-2'"):
        finish(replace(SMALL, corpus="wikitext-2"), tmp_path, text)


def test_perplexity_falls_well_below_that_of_the_unigrams(tmp_path: Path) -> None:
    """Each word follows from the one two before it, which only attention can know."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(11, (3_000, 2), generator=generator).tolist()
    lines = []
    for words in first:
        while len(words) < 12:
            words.append((3 * words[-2] + 1) % 11)
        lines.append(" ".join(WORDS[word] for word in words))
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines) + "\n")
    config = replace(
        SMALL, dim=32, tokens=16, batch=16, steps=400, measure_every=200, predict_every=9,
        layers=1, scale_strength=0.0, mean_strength=0.0, learning_rate=3e-3,
    )  # fmt: skip
    run = finish(config, tmp_path / "run", path, every=400)
    corpus = load_corpus(path)
    counts = Counter(corpus.train.tolist())
    total = sum(counts.values())
    unigram = -sum(math.log(counts[t] / total) for t in corpus.valid.tolist()) / len(corpus.valid)
    assert run.final is not None
    assert run.records[0]["valid_loss"] > unigram  # before training it is worse
    assert run.final["whole_valid_loss"] < 0.5 * unigram


def test_both_normalizations_differ_by_the_tokens_of_a_batch() -> None:
    mean = replace(SMALL, normalization="mean").penalty
    summed = replace(SMALL, normalization="sum").penalty
    assert mean is not None and summed is not None
    assert isinstance(summed, LocAteRConfig)
    assert summed.scale_strength == mean.scale_strength / (4 * 8)
    assert summed.mean_strength == mean.mean_strength / (4 * 8)
    assert summed.equilibrium(8) == pytest.approx(mean.equilibrium(8))
    assert replace(SMALL, scale_strength=0.0, mean_strength=0.0).penalty is None


@pytest.mark.parametrize("kind", ["as it is", "pre-norm, joint", "qk-norm"])
def test_checkpoints_of_a_run_are_audited_like_any_others(
    kind: str, text: Path, tmp_path: Path
) -> None:
    """The rows of the stored weights are those of the live model, two checkpoints a timeline."""
    changes: dict[str, Any] = {
        "pre-norm, joint": {"norm": "pre", "qk": "joint"},
        "qk-norm": {"stabilizer": "qk-norm", "scale_strength": 0.0, "mean_strength": 0.0},
    }.get(kind, {})
    finish(replace(SMALL, **changes), tmp_path, text)
    places = sorted((tmp_path / "checkpoints").glob("step-*"))
    timeline = audit_timeline(places, tokens=8)
    assert len(timeline.audits) == 2 and len(timeline.trajectories()) == 2
    model, _ = load_trained(tmp_path, data=str(text))
    live = audit_model(model, tokens=8)
    for stored, running in zip(timeline.audits[-1].rows, live.rows, strict=True):
        assert (stored.name, stored.trace) == (running.name, running.trace)
        assert stored.r == pytest.approx(running.r, rel=1e-12)
        assert stored.entropy == pytest.approx(running.entropy, rel=1e-5)  # drawn in float32
    assert {row.verdict for row in live.rows} == {"not judged"}  # no text was read
    assert timeline.audits[0].rows != timeline.audits[1].rows


SEVERAL = replace(SMALL, evaluations=4, measure_every=5, predict_every=99, learning_rate=0.3)
OVERFIT = replace(SEVERAL, scale_strength=0.0, mean_strength=0.0, steps=40)
"""A high rate overfits at once, so that the best step is not the last."""


@pytest.fixture(scope="module")
def overfit(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to read."""
    folder = tmp_path_factory.mktemp("overfit")
    finish(OVERFIT, folder, text, every=11)
    return folder


def test_the_best_evaluation_is_kept_and_scored_on_test_once(
    overfit: Path, text: Path, tmp_path: Path
) -> None:
    config, run = OVERFIT, Run.load(overfit)
    scored = dict(run.series("whole_valid_loss"))
    assert tuple(scored) == config.evaluation_steps == (2, 10, 22, 40)
    assert run.final is not None
    best = run.final["best_step"]
    assert scored[best] == min(scored.values()) == run.final["best_valid_loss"]
    assert best != 40
    assert [step for step, _ in run.series("test_loss")] == [40]
    short = replace(config, steps=best, evaluations=1, measure_every=best)
    finish(short, tmp_path / "short", text)  # the same draws: the model of that step
    model, material = load_trained(tmp_path / "short", data=str(text))
    loss = Meter(model, material.valid, material.whole_valid, torch.device("cpu")).loss
    assert material.whole_test is not None
    assert run.final["test_loss"] == rounded(loss(material.whole_test))
    assert run.final["test_loss"] != rounded(loss(material.whole_valid))


def test_a_run_with_several_evaluations_goes_on_bit_by_bit(
    overfit: Path, text: Path, tmp_path: Path
) -> None:
    """Cut after the best evaluation: that model is in the checkpoint, or test would differ."""

    def stop(progress: object) -> None:
        if progress.step == 35:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        train(OVERFIT, cut, data=str(text), checkpoint_every=11, trackers=(), report=stop)
    finish(OVERFIT, cut, text, every=11)
    assert contents(cut) == contents(overfit)


def test_patience_ends_a_run_that_gets_no_better(text: Path, tmp_path: Path) -> None:
    config = replace(SEVERAL, steps=400, evaluations=20, patience=3, measure_every=200)
    run = finish(config, tmp_path / "run", text, every=100)
    assert run.final is not None
    assert run.final["end"] == "finished"
    steps = config.evaluation_steps
    assert run.final["step"] == steps[steps.index(run.final["best_step"]) + 3] < 400
    assert finish(config, tmp_path / "run", text).records == run.records  # and it is not continued


def test_a_share_of_a_text_is_its_first_lines(text: Path, tmp_path: Path) -> None:
    part, whole = load_corpus(text, share=0.25), load_corpus(text)
    assert part.digest != whole.digest
    lines = text.read_text().splitlines()[: round(360 * 0.25)]
    assert [part.vocabulary[word] for word in part.train] == [
        word for line in lines for word in (*line.split(), "<eos>")
    ]
    assert part.valid.numel() == whole.valid.numel()
    assert part.test.numel() == whole.test.numel()
    run = finish(replace(SMALL, share=0.25), tmp_path / "run", text)
    assert run.environment["corpus"]["share"] == 0.25
    assert run.environment["corpus"]["digest"] == part.digest
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match="share must be above 0 and at most 1"):
            replace(SMALL, share=share)


def test_the_learning_rate_warms_up_and_falls_and_gradients_are_clipped(
    text: Path, tmp_path: Path
) -> None:
    """Against a loop by hand: two runs differ in nothing else."""
    config = replace(SMALL, warmup=4, schedule="cosine", clip=0.05, scale_strength=0.0,
                     mean_strength=0.0, dropout=0.0)  # fmt: skip
    run = finish(config, tmp_path / "run", text)
    material = load_material(config, str(text))
    model = material.model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01)
    losses = []
    for step in range(12):
        rise = (step + 1) / 4
        fall = (1 + math.cos(math.pi * (step - 4) / 8)) / 2
        optimizer.param_groups[0]["lr"] = 1e-2 * (rise if step < 4 else fall)
        loss = model.loss(*material.train.at(step))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05  # it does act
        optimizer.step()
        losses.append(loss.item())
    found = [record["train_loss"] for record in run.records[1:]]
    expected = [sum(losses[at : at + 3]) / 3 for at in range(0, 12, 3)]
    assert found == pytest.approx(expected, rel=1e-5)


EACH = """
import errno, json, os, shutil, sys
from pathlib import Path
import torch
import torch._dynamo  # the optimizer's: once, for all children
torch.set_num_threads(1)
from locater.errors import LocaterError
from locater.paper.lab.batches import load_material
from locater.paper.lab.model import (
    STABILIZERS,
    StabilizerName,
    Transformer,
    TransformerConfig,
    apply_stabilizer,
)
from locater.paper.lab.run import RunFolder
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.train import train
config, base, text, kind = TrainConfig.from_dict(json.loads(sys.argv[1])), *sys.argv[2:]
base = Path(base)
load_material(config, text)

def go(out):
    train(config, out, data=text, checkpoint_every=4, trackers=())

def fail_at(count):
    "The call of this number, of all that change the disk, does not come back."
    def watched(call):
        def instead(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                if kind == "kill":
                    os._exit(9)
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*args, **kwargs)
        return instead
    for owner, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir"),
                        (os, "truncate"), (os, "unlink"), (os, "rmdir")):
        setattr(owner, name, watched(getattr(owner, name)))

left = [0]

def child(work, count=0):
    left[0] = count
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except LocaterError as error:
            print(error.message, file=sys.stderr)
            os._exit(1)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(3)
        os._exit(5 if left[0] > 0 else 0)  # 5: it never came to that call
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def bytes_of(out):
    files = [out / "metrics.jsonl", *out.glob("checkpoints/step-00000012/*.safetensors")]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}

for count in range(1, 200):
    out = base / str(count)
    shutil.copytree(base / "begun", out)
    code = child(lambda: (fail_at(count), go(out)), count)
    folder = RunFolder(out, is_writer=False)
    said = folder.load().final is not None
    steps = [path.name for path in (out / "checkpoints").glob("step-*")]
    row = {"code": code, "said": said, "there": folder.finished() is not None, "steps": steps}
    assert child(lambda: go(out)) == 0
    row["same"] = bytes_of(out) == bytes_of(base / "whole")
    print(json.dumps(row), flush=True)
    shutil.rmtree(out)
    if code == 5:
        break
"""


@pytest.mark.parametrize(
    ("kind", "code"), [("kill", 9), pytest.param("full disk", 1, marks=pytest.mark.slow)]
)
def test_nothing_is_reported_that_is_not_there_whatever_fails_in_the_last_save(
    kind: str, code: int, text: Path, tmp_path: Path
) -> None:
    """At every call that changes the disk, from the last checkpoint but one to the end."""
    config = replace(SHORT, steps=12, tokens=4, evaluations=3, measure_every=12)
    finish(config, tmp_path / "whole", text)

    def stop(progress: object) -> None:
        if progress.step == 11:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    begun = tmp_path / "begun"
    with pytest.raises(KeyboardInterrupt):
        train(config, begun, data=str(text), checkpoint_every=4, trackers=(), report=stop)
    settings = json.dumps({**config.changes()})
    done = subprocess.run(
        [sys.executable, "-c", EACH, settings, str(tmp_path), str(text), kind],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 15  # four files, their names, the folder's, the old ones, the record
    assert {row["code"] for row in rows[:-1]} <= {code, 0}  # 0: an old folder that stays hurts not
    assert sum(row["code"] == code for row in rows) > 12
    assert rows[-1]["code"] == 5
    assert all(row["there"] for row in rows if row["said"])
    assert any(row["said"] for row in rows)
    assert any(not row["said"] for row in rows)
    assert all(row["same"] for row in rows)


def test_a_run_whose_last_model_is_gone_is_not_finished(text: Path, tmp_path: Path) -> None:
    whole = finish(SMALL, tmp_path / "run", text)
    before = contents(tmp_path / "run")
    (last,) = (tmp_path / "run" / "checkpoints").glob("step-00000012")
    (last / "model.safetensors").write_bytes(b"")
    assert RunFolder(tmp_path / "run", is_writer=False).finished() is None
    assert finish(SMALL, tmp_path / "run", text).records == whole.records
    assert contents(tmp_path / "run") == before


def test_what_a_finished_run_measured_outlives_its_checkpoints(text: Path, tmp_path: Path) -> None:
    finish(SMALL, tmp_path / "run", text)
    measured = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    said: list[str] = []
    train(SMALL, tmp_path / "run", data=str(text), trackers=(), say=said.append)
    assert "its metrics are in" in said[0]
    assert (tmp_path / "run" / "metrics.old.jsonl").read_bytes() == measured
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == measured
