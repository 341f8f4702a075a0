"""What attention does appears in other people's logs, and their training stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.loggers import CSVLogger
from tests.control.test_trainers import Texts, arguments, gpt2
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from locater import Probe
from locater.control.trainers import ProbeCallback, ProbeLightning, ProbeMixin
from locater.probe.probe import new_metrics

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*Starting from v1.9.0.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]
ENTROPY = "locater/layer_1/entropy"


class Watched(ProbeMixin, Trainer):
    pass


def expected(texts: Texts, step: int) -> float:
    """Layer 1's entropy in a step of the same training, by a probe of one's own."""
    model = gpt2().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = Probe(model)
    for batch in texts.ids.split(2)[: step + 1]:
        probe.reset()
        with probe:
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return probe.metrics()[ENTROPY]


@pytest.mark.parametrize("way", ["mixin", "callback"])
def test_the_hugging_face_trainer_logs_what_was_measured(way: str, tmp_path: Path) -> None:
    texts, model, plain = Texts(8), gpt2(), gpt2()
    settings = arguments(tmp_path, max_steps=4)
    if way == "mixin":
        trainer: Any = Watched(model, settings, train_dataset=texts, probe={"every": 2})
    else:
        callback = ProbeCallback({"every": 2})
        trainer = Trainer(model, settings, train_dataset=texts, callbacks=[callback])
    trainer.train()
    logs = [one for one in trainer.state.log_history if "loss" in one]
    assert [ENTROPY in one for one in logs] == [True, False, True, False]
    assert logs[0][ENTROPY] == pytest.approx(expected(texts, 0), rel=1e-6)
    assert logs[2][ENTROPY] == pytest.approx(expected(texts, 2), rel=1e-5)
    assert logs[2][ENTROPY] != pytest.approx(logs[0][ENTROPY], rel=1e-5)
    Trainer(plain, settings, train_dataset=texts).train()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not model._forward_hooks and not model._forward_pre_hooks


class Tracker(TrainerCallback):
    """Stands in for W&B's and trackio's callbacks, which send what `on_log` is given."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.sent.append(dict(kwargs["logs"]))


@pytest.mark.parametrize("way", ["mixin", "callback"])
def test_trackers_are_sent_every_head(way: str, tmp_path: Path) -> None:
    tracker, settings = Tracker(), {"every": 1, "per_head": True, "queries": "all"}
    given: dict[str, Any] = {"train_dataset": Texts(2), "callbacks": [tracker]}
    if way == "mixin":
        Watched(gpt2(), arguments(tmp_path, max_steps=1), probe=settings, **given).train()
    else:
        given["callbacks"] = [ProbeCallback(settings), tracker]
        Trainer(gpt2(), arguments(tmp_path, max_steps=1), **given).train()
    (sent,) = [one for one in tracker.sent if "loss" in one]
    heads = [sent[f"locater/layer_1/head_{head}/entropy"] for head in range(gpt2().config.n_head)]
    assert sum(heads) / len(heads) == pytest.approx(sent[ENTROPY])


class Lit(lightning.LightningModule):
    """Calls a part of itself, with activations recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        def loss(ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, labels=ids).loss

        return checkpoint(loss, batch["input_ids"], use_reentrant=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_logs_what_was_measured_once(tmp_path: Path) -> None:
    texts, module, callback = Texts(8), Lit(), ProbeLightning({"every": 2, "queries": "all"})
    seen = []

    class After(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(dict(trainer.callback_metrics))

        def on_before_backward(self, *_: Any) -> None:
            assert callback.probe is not None
            if callback.probe.measured:
                assert {one.rows for one in callback.probe.records} == {2 * 4}

    lightning.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, After()],
    ).fit(module, DataLoader(texts, batch_size=2))
    assert len(seen) == 4 and ENTROPY in seen[0]
    assert callback.probe is not None and callback.probe.forwards == 4
    with Probe(gpt2().train(), queries="all") as truth:
        truth.model(input_ids=texts.ids[:2], labels=texts.ids[:2])
    assert seen[0][ENTROPY].item() == pytest.approx(truth.metrics()[ENTROPY], rel=1e-6)
    (written,) = tmp_path.rglob("metrics.csv")
    assert ENTROPY in written.read_text().splitlines()[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_accelerate_writes_the_metrics_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    model = accelerator.prepare(gpt2())
    probe = Probe(model, every=2, when="training", keep=0)
    values = []
    with probe:
        for step, batch in enumerate(Texts(8).ids.split(2)):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            if probe.measured:
                values.append(probe.metrics()[ENTROPY])
                accelerator.log(new_metrics(probe), step=step)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    written = events.Scalars(ENTROPY)
    assert [one.step for one in written] == [0, 2]
    assert [one.value for one in written] == pytest.approx(values, rel=1e-6)


def test_a_loop_that_calls_parts_of_a_model_says_when() -> None:
    model = nn.ModuleDict({"encoder": nn.TransformerEncoderLayer(8, 2, batch_first=True)})
    probe = Probe(model, every=2)
    for _ in range(3):
        probe.begin()
        model["encoder"](torch.ones(2, 4, 8))
        probe.end()
    assert (probe.forwards, probe.measured) == (3, 2)
    assert [one.name for one in probe.records] == ["encoder.self_attn"] * 2
    assert {one.rows for one in probe.records} == {4}
