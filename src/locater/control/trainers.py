"""LocAteR and the probe in other people's loops: the Hugging Face Trainer, and Lightning.

Callbacks are classes of those libraries, which are imported when a callback is asked for: the extra
`hf` brings the one, `lightning` the other, and neither needs both.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from locater.control.locater import LocAteR, as_regularizer
from locater.core.penalty import LocAteRConfig
from locater.errors import MissingExtraError
from locater.probe.probe import Probe, new_metrics, training_probe

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


class _WithLocAteR:
    """A callback's penalty, made when training begins, after any wrapping of the model."""

    def __init__(self, locater: LocAteRConfig | LocAteR | None = None) -> None:
        self.locater = locater
        self.regularizer: LocAteR | None = None

    def _begin(self, model: nn.Module) -> None:
        self.regularizer = as_regularizer(model, self.locater)

    def _add_gradients(self) -> None:
        assert self.regularizer is not None
        self.regularizer.add_gradients()

    def _metrics(self) -> dict[str, float]:
        return {} if self.regularizer is None else self.regularizer.metrics()


class _WithProbe:
    """A callback's probe, made when training begins."""

    def __init__(self, probe: dict[str, Any] | None = None) -> None:
        self.settings = probe
        self.probe: Probe | None = None

    def _begin(self, model: nn.Module) -> None:
        self.probe = training_probe(model, self.settings)

    def _metrics(self) -> dict[str, float]:
        return {} if self.probe is None else new_metrics(self.probe)


class _TrainerLog:
    """Metrics beside the training loss: what later callbacks and the history see."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Add the metrics."""
        if logs is not None and "loss" in logs:
            metrics = self._metrics()  # type: ignore[attr-defined]
            logs.update(metrics)
            if state.log_history:
                state.log_history[-1].update(metrics)


class _LocAteRCallback(_WithLocAteR, _TrainerLog):
    """Adds the penalty's gradient before every optimizer step, for a Trainer one cannot subclass.

    It comes after gradient clipping, so the penalty is not clipped; its metrics go into
    `trainer.state.log_history` entries that are written after it.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the attentions of the model that is about to be trained."""
        self._begin(kwargs["model"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the gradient, once per step."""
        self._add_gradients()


class _ProbeCallback(_WithProbe, _TrainerLog):
    """`ProbeMixin` for a Trainer one cannot subclass; loggers after it see its metrics."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start watching the model that is about to be trained."""
        self._begin(kwargs["model"])
        assert self.probe is not None
        self.probe.attach()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model alone."""
        if self.probe is not None:
            self.probe.detach()


class _LightningLog:
    """Metrics when the Trainer logs."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the attentions."""
        self._begin(pl_module)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log when the Trainer does."""
        if (trainer.global_step % trainer.log_every_n_steps) == 0:
            pl_module.log_dict(self._metrics())  # type: ignore[attr-defined]


class _LocAteRLightning(_WithLocAteR, _LightningLog):
    """Adds the penalty's gradient once per optimizer step, before clipping, and logs its metrics.

    `lightning.Trainer(callbacks=[LocAteRLightning(LocAteRConfig(…))])`; gradients are unscaled by
    then, whatever the precision, and any number of batches may have been accumulated.
    """

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Add the gradient."""
        self._add_gradients()


class _ProbeLightning(_WithProbe, _LightningLog):
    """Logs what attention does in training, under `locater/layer_{i}/…`, when the Trainer logs.

    `lightning.Trainer(callbacks=[ProbeLightning({"every": 100})])`, with the settings of a `Probe`.
    It watches from the start of a batch to its backward pass, whatever the module calls.
    """

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Count the batch, and watch it if it is one to measure."""
        assert self.probe is not None
        self.probe.begin()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Stop before activations are recomputed."""
        assert self.probe is not None
        self.probe.end()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log when the Trainer does."""
        assert self.probe is not None
        self.probe.end()
        super().on_train_batch_end(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching whatever happened."""
        if self.probe is not None:
            self.probe.detach()


_CALLBACKS = {
    "LocAteRCallback": (_LocAteRCallback, "transformers", "TrainerCallback", "hf"),
    "ProbeCallback": (_ProbeCallback, "transformers", "TrainerCallback", "hf"),
    "LocAteRLightning": (_LocAteRLightning, "lightning", "Callback", "lightning"),
    "ProbeLightning": (_ProbeLightning, "lightning", "Callback", "lightning"),
}


def __getattr__(name: str) -> Any:
    """A callback as a class of the library that calls it, made when it is first asked for."""
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    does, library, base, extra = _CALLBACKS[name]
    try:
        parent = getattr(import_module(library), base)
    except ImportError as error:
        raise MissingExtraError(library, extra=extra) from error
    made = type(name, (does, parent), {"__module__": __name__, "__doc__": does.__doc__})
    globals()[name] = made  # the same class next time, also for pickle
    return made
