"""LocAteR and the probe in other people's loops: the Hugging Face Trainer, and Lightning.

Callbacks are classes of those libraries, which are imported when a callback is asked for: the extra
`hf` brings the one, `lightning` the other, and neither needs both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


class _LocAteREvents:
    """Adds the penalty's gradient once per optimizer step, and its metrics to the logs.

    `callbacks=[LocAteRCallback(LocAteRConfig(…))]` for a Hugging Face Trainer that one cannot
    subclass: it comes after gradient clipping, so the penalty is not clipped, and its metrics go to
    callbacks after it.  `callbacks=[LocAteRLightning(LocAteRConfig(…))]` for Lightning: before
    clipping, on unscaled gradients, however many batches were accumulated.
    """

    def __init__(self, locater: LocAteRConfig | LocAteR | None = None) -> None:
        self.locater = locater
        self.regularizer: LocAteR | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the attentions of the model that is about to be trained."""
        self.regularizer = as_regularizer(kwargs["model"], self.locater)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the attentions, after any wrapping of the model."""
        self.regularizer = as_regularizer(pl_module, self.locater)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Add the gradient, once per step."""
        assert self.regularizer is not None
        self.regularizer.add_gradients()

    on_before_optimizer_step = on_pre_optimizer_step  # Lightning's name for it

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metrics to the Trainer's logs."""
        if self.regularizer is not None:
            _add_to_logs(self.regularizer.metrics, state, **kwargs)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log when Lightning does."""
        assert self.regularizer is not None
        if (trainer.global_step % trainer.log_every_n_steps) == 0:
            pl_module.log_dict(self.regularizer.metrics())


class _ProbeEvents:
    """Logs what attention does in training, under `locater/layer_{i}/…`, beside the loss.

    `callbacks=[ProbeCallback({"every": 100})]` with the settings of a `Probe`, for a Hugging Face
    Trainer that one cannot subclass; callbacks after it see its metrics.
    `callbacks=[ProbeLightning({"every": 100})]` for Lightning watches from the start of a batch to
    its backward pass, whatever the module calls.
    """

    def __init__(self, probe: dict[str, Any] | None = None) -> None:
        self.settings = probe
        self.probe: Probe | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start watching the model that is about to be trained."""
        self.probe = training_probe(kwargs["model"], self.settings)
        self.probe.attach()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the model alone."""
        if self.probe is not None:
            self.probe.detach()

    on_exception = on_train_end

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metrics to the Trainer's logs."""
        if self.probe is not None:
            _add_to_logs(partial(new_metrics, self.probe), state, **kwargs)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the attentions."""
        self.probe = training_probe(pl_module, self.settings)

    def on_train_batch_start(self, *args: Any) -> None:
        """Count the batch, and watch it if it is one to measure."""
        assert self.probe is not None
        self.probe.begin()

    def on_before_backward(self, *args: Any) -> None:
        """Stop before activations are recomputed."""
        assert self.probe is not None
        self.probe.end()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log when Lightning does."""
        assert self.probe is not None
        self.probe.end()
        if (trainer.global_step % trainer.log_every_n_steps) == 0:
            pl_module.log_dict(new_metrics(self.probe))


def _add_to_logs(
    metrics: Callable[[], dict[str, float]],
    state: Any,
    logs: dict[str, float] | None = None,
    **_: Any,
) -> None:
    """Put metrics beside a training loss, for the callbacks that follow and for the history."""
    if logs is not None and "loss" in logs:
        found = metrics()
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


_CALLBACKS = {
    "LocAteRCallback": (_LocAteREvents, "transformers", "TrainerCallback", "hf"),
    "ProbeCallback": (_ProbeEvents, "transformers", "TrainerCallback", "hf"),
    "LocAteRLightning": (_LocAteREvents, "lightning", "Callback", "lightning"),
    "ProbeLightning": (_ProbeEvents, "lightning", "Callback", "lightning"),
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
