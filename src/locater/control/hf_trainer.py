"""LocAteR and the probe in the Hugging Face Trainer (extra `hf`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from locater.control.locater import LocAteR, as_regularizer
from locater.core.penalty import LocAteRConfig
from locater.errors import MissingExtraError
from locater.probe.probe import Probe, new_metrics, training_probe

try:
    from transformers import TrainerCallback
except ImportError as error:  # pragma: no cover - the dev environment has it
    raise MissingExtraError("transformers", extra="hf") from error

if TYPE_CHECKING:
    from transformers import Trainer

    _Base = Trainer
else:
    _Base = object


class LocAteRMixin(_Base):
    """Adds the penalty to a Trainer's training loss and its metrics to the Trainer's logs.

    `class MyTrainer(LocAteRMixin, Trainer): pass`, then `MyTrainer(…, locater=LocAteRConfig(…))`.
    The penalty counts once per optimizer step, however many batches are accumulated; the
    evaluation loss is left alone.
    """

    def __init__(
        self, *args: Any, locater: LocAteRConfig | LocAteR | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        assert self.model is not None
        self.regularizer = as_regularizer(self.model, locater)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The Trainer's own loss, plus the penalty while the model trains."""
        # before the forward pass, where FSDP2 still holds the sharded float32 parameters
        penalty = self.regularizer.penalty() if model.training else None
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if penalty is not None:
            loss = loss + penalty.to(loss.device) * self._share(num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _share(self, num_items_in_batch: Any) -> float:
        """The Trainer divides some losses by the accumulated batches itself, and others not."""
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = counted or self.compute_loss_func is not None
        steps = getattr(self, "current_gradient_accumulation_steps", None)
        return 1 / (steps or self.args.gradient_accumulation_steps) if is_scaled else 1.0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's own logs, with `locater/…` beside every training loss."""
        if "loss" in logs:
            logs = {**logs, **self.regularizer.metrics()}
        super().log(logs, *args, **kwargs)


class LocAteRCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Adds the penalty's gradient before every optimizer step, for a Trainer one cannot subclass.

    It comes after gradient clipping, so the penalty is not clipped; its metrics go into
    `trainer.state.log_history` entries that are written after it.
    """

    def __init__(self, locater: LocAteRConfig | LocAteR | None = None) -> None:
        self.locater = locater
        self.regularizer: LocAteR | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the attentions of the model that is about to be trained."""
        self.regularizer = as_regularizer(kwargs["model"], self.locater)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the gradient, once per step."""
        assert self.regularizer is not None
        self.regularizer.add_gradients()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Add the metrics to what later callbacks and the history see."""
        if logs is not None and "loss" in logs and self.regularizer is not None:
            metrics = self.regularizer.metrics()
            logs.update(metrics)
            if state.log_history:
                state.log_history[-1].update(metrics)


class ProbeMixin(_Base):
    """Puts what attention does in training beside every training loss that a Trainer logs.

    `class MyTrainer(ProbeMixin, Trainer): pass`, then `MyTrainer(…, probe={"every": 100})` with the
    settings of a `Probe`.  Each log covers the passes measured since the last one.
    """

    def __init__(self, *args: Any, probe: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.model is not None
        self.probe = training_probe(self.model, probe)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, watched."""
        with self.probe:
            return super().train(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's own logs, with `locater/layer_{i}/…` beside the training loss."""
        if "loss" in logs:
            logs = {**logs, **new_metrics(self.probe)}
        super().log(logs, *args, **kwargs)


class ProbeCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """The same for a Trainer one cannot subclass; loggers that come after it see its metrics."""

    def __init__(self, probe: dict[str, Any] | None = None) -> None:
        self.settings = probe
        self.probe: Probe | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start watching the model that is about to be trained."""
        self.probe = training_probe(kwargs["model"], self.settings)
        self.probe.attach()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model alone."""
        if self.probe is not None:
            self.probe.detach()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Add the metrics to what later callbacks and the history see."""
        if logs is not None and "loss" in logs and self.probe is not None:
            metrics = new_metrics(self.probe)
            logs.update(metrics)
            if state.log_history:
                state.log_history[-1].update(metrics)
