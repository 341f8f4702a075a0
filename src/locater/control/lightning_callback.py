"""LocAteR and the probe in Lightning (extra `lightning`)."""

from __future__ import annotations

from typing import Any

from locater.control.locater import LocAteR, as_regularizer
from locater.core.penalty import LocAteRConfig
from locater.errors import MissingExtraError
from locater.probe.probe import Probe, new_metrics, training_probe

try:
    import lightning
except ImportError as error:  # pragma: no cover - the dev environment has it
    raise MissingExtraError("lightning", extra="lightning") from error


class LocAteRLightning(lightning.Callback):
    """Adds the penalty's gradient once per optimizer step, before clipping, and logs its metrics.

    `lightning.Trainer(callbacks=[LocAteRLightning(LocAteRConfig(…))])`; gradients are unscaled by
    then, whatever the precision, and any number of batches may have been accumulated.
    """

    def __init__(self, locater: LocAteRConfig | LocAteR | None = None) -> None:
        self.locater = locater
        self.regularizer: LocAteR | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the attentions, after any wrapping of the model."""
        self.regularizer = as_regularizer(pl_module, self.locater)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Add the gradient."""
        assert self.regularizer is not None
        self.regularizer.add_gradients()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log when the Trainer does."""
        assert self.regularizer is not None
        if (trainer.global_step % trainer.log_every_n_steps) == 0:
            pl_module.log_dict(self.regularizer.metrics())


class ProbeLightning(lightning.Callback):
    """Logs what attention does in training, under `locater/layer_{i}/…`, when the Trainer logs.

    `lightning.Trainer(callbacks=[ProbeLightning({"every": 100})])`, with the settings of a `Probe`.
    It listens from the start of a batch to its backward pass, whatever the module calls.
    """

    def __init__(self, probe: dict[str, Any] | None = None) -> None:
        self.settings = probe
        self.probe: Probe | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the attentions."""
        self.probe = training_probe(pl_module, self.settings)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Count the batch, and listen if it is one to measure."""
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
        if (trainer.global_step % trainer.log_every_n_steps) == 0:
            pl_module.log_dict(new_metrics(self.probe))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop listening whatever happened."""
        if self.probe is not None:
            self.probe.detach()
