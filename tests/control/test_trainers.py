"""LocAteR in other people's training loops: one optimizer step is that of the plain computation."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from locater import LocAteR, LocAteRConfig
from locater.control.trainers import LocAteRCallback, LocAteRLightning, LocAteRMixin

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*Starting from v1.9.0.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]
CONFIG = LocAteRConfig(scale_strength=0.3, mean_strength=2.0, target=1.5)
STRONG = LocAteRConfig(scale_strength=20.0, mean_strength=20.0, target=2.0)
BATCH, TOKENS, RATE = 2, 5, 0.1


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens, all of the same length, so that every batch has as many targets."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(11, (count, TOKENS), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        # the first label is never predicted, but the Trainer would count it
        labels = torch.cat([torch.tensor([-100]), self.ids[place, 1:]])
        return {"input_ids": self.ids[place], "labels": labels}


class Plain(nn.Module):
    """A model that knows nothing of the Trainer's way to average over accumulated batches."""

    def __init__(self, inner: GPT2LMHeadModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.inner(input_ids=input_ids, labels=labels)
        return {"loss": outputs.loss, "logits": outputs.logits}


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def arguments(out: Path, **settings: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": BATCH,
        "max_steps": 1,
        "learning_rate": RATE,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(**{**chosen, **settings})


class Regularized(LocAteRMixin, Trainer):
    pass


def one_plain_step(texts: Texts, *, clip: float | None = None, is_after: bool = False) -> Any:
    """The whole batch at once, loss and penalty, by hand."""
    model = gpt2()
    loss = model(input_ids=texts.ids, labels=texts.ids).loss
    regularizer = LocAteR(model, CONFIG)
    (loss if is_after else loss + regularizer.penalty()).backward()
    if clip is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        assert norm > clip
    if is_after:
        regularizer.add_gradients()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return dict(model.named_parameters())


def assert_same_step(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """As close as float32 sums of a few batches in another order, on weights of size one."""
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapped", [False, True], ids=["counts items", "plain model"])
@pytest.mark.parametrize("accumulated", [1, 4])
def test_hugging_face_mixin_takes_the_plain_step(
    accumulated: int, wrapped: bool, tmp_path: Path
) -> None:
    texts = Texts(BATCH * accumulated)
    model = gpt2()
    trainer = Regularized(
        model=Plain(model) if wrapped else model,
        args=arguments(tmp_path, gradient_accumulation_steps=accumulated),
        train_dataset=texts,
        locater=CONFIG,
    )
    before = trainer.regularizer.metrics()
    trainer.train()
    assert_same_step(model, one_plain_step(texts))
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    after = trainer.regularizer.metrics()
    assert {key: entry[key] for key in after} == pytest.approx(after)
    assert after["locater/global_trace"] != pytest.approx(before["locater/global_trace"])


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_hugging_face_callback_takes_the_plain_step(
    accumulated: int, clip: float, tmp_path: Path
) -> None:
    texts = Texts(BATCH * accumulated)
    model, callback = gpt2(), LocAteRCallback(CONFIG)
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, gradient_accumulation_steps=accumulated, max_grad_norm=clip),
        train_dataset=texts,
        callbacks=[callback],
    )
    trainer.train()
    assert_same_step(model, one_plain_step(texts, clip=clip or None, is_after=True))
    assert callback.regularizer is not None
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    after = callback.regularizer.metrics()
    assert {key: entry[key] for key in after} == pytest.approx(after)


def test_evaluation_has_no_penalty(tmp_path: Path) -> None:
    texts, model = Texts(4), gpt2()
    trainer = Regularized(
        model=model,
        args=arguments(tmp_path),
        train_dataset=texts,
        eval_dataset=texts,
        locater=LocAteRConfig(scale_strength=100.0, mean_strength=100.0),
    )
    found = trainer.evaluate()
    with torch.no_grad():
        expected = model(input_ids=texts.ids, labels=texts.ids).loss.item()
    assert trainer.regularizer.penalty().item() > 100
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)


def approaches(start: float, end: float, *, config: LocAteRConfig, rank: int) -> bool:
    """The trace has gone nine tenths of its way to where the penalty alone would rest."""
    rest = config.equilibrium(rank)
    return abs(end - rest) < 0.1 * abs(start - rest)


@pytest.mark.parametrize("way", ["mixin", "callback"])
def test_hugging_face_training_approaches_the_equilibrium(way: str, tmp_path: Path) -> None:
    settings = arguments(
        tmp_path, max_steps=80, optim="adamw_torch", learning_rate=0.01, logging_steps=80
    )
    model, texts = gpt2(), Texts(8)
    start = LocAteR(model, STRONG).metrics()["locater/global_trace"]
    if way == "mixin":
        trainer: Trainer = Regularized(
            model=model, args=settings, train_dataset=texts, locater=STRONG
        )
    else:
        callback = LocAteRCallback(STRONG)
        trainer = Trainer(model=model, args=settings, train_dataset=texts, callbacks=[callback])
    trainer.train()
    end = LocAteR(model, STRONG).metrics()["locater/global_trace"]
    assert approaches(start, end, config=STRONG, rank=8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own imports
def test_metrics_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = Regularized(
        model=gpt2(),
        args=arguments(tmp_path, report_to=["tensorboard"]),
        train_dataset=Texts(BATCH),
        locater=CONFIG,
    )
    trainer.train()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (tmp_path / "events").rglob("events.out.tfevents.*")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = EventAccumulator(str(file)).Reload()  # type: ignore[no-untyped-call]
    tag = "train/locater/layer_0/trace"
    assert tag in events.Tags()["scalars"]  # type: ignore[no-untyped-call]
    (point,) = events.Scalars(tag)  # type: ignore[no-untyped-call]
    value = trainer.regularizer.metrics()["locater/layer_0/trace"]
    assert point.value == pytest.approx(value, rel=1e-6)


class Lit(lightning.LightningModule):
    def __init__(self, *, optimizer: str = "sgd", rate: float = RATE) -> None:
        super().__init__()
        self.model = gpt2()
        self.choice, self.rate = optimizer, rate

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.choice == "adam":
            return torch.optim.Adam(self.parameters(), lr=self.rate)
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def fit(module: Lit, callback: LocAteRLightning, texts: Texts, **settings: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        **{"max_steps": 1, "log_every_n_steps": 1, **settings},
    )
    trainer.fit(module, DataLoader(texts, batch_size=BATCH))
    return trainer


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_lightning_takes_the_plain_step(accumulated: int, clip: float | None) -> None:
    """Here the penalty's gradient is clipped with the rest."""
    texts, module = Texts(BATCH * accumulated), Lit()
    callback = LocAteRLightning(CONFIG)
    trainer = fit(
        module, callback, texts, accumulate_grad_batches=accumulated, gradient_clip_val=clip
    )
    assert_same_step(module.model, one_plain_step(texts, clip=clip))
    assert callback.regularizer is not None
    metrics = callback.regularizer.metrics()
    logged = {key: trainer.logged_metrics[key].item() for key in metrics}
    assert logged == pytest.approx(metrics)


def test_lightning_training_approaches_the_equilibrium() -> None:
    module, callback = Lit(optimizer="adam", rate=0.01), LocAteRLightning(STRONG)
    start = LocAteR(module, STRONG).metrics()["locater/global_trace"]
    fit(module, callback, Texts(8), max_steps=80)
    end = LocAteR(module, STRONG).metrics()["locater/global_trace"]
    assert approaches(start, end, config=STRONG, rank=8)


@pytest.mark.parametrize(
    ("missing", "here", "gone"),
    [
        ("lightning", "LocAteRCallback, LocAteRMixin, ProbeCallback, ProbeMixin", "ProbeLightning"),
        ("transformers", "LocAteRLightning, LocAteRMixin, ProbeLightning", "ProbeCallback"),
    ],
)
def test_callbacks_need_only_the_library_that_calls_them(
    missing: str, here: str, gone: str
) -> None:
    other = {"lightning": "transformers", "transformers": "lightning"}[missing]
    script = f"""
import importlib, pickle, sys
importlib.import_module({other!r})  # what it needs of its own it may have
sys.modules[{missing!r}] = None
from locater import MissingExtraError
import locater.control.trainers as trainers
from locater.control.trainers import {here}
for made in ({here},):
    assert made is getattr(trainers, made.__name__) and made.__doc__
callback = {here.split(",")[0]}()
assert type(pickle.loads(pickle.dumps(callback))) is type(callback)
try:
    trainers.{gone}
except MissingExtraError as error:
    assert {missing!r} in str(error) and "pip install" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
