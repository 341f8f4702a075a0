"""One loop for every experiment of Section 7 and Appendix D, and what is measured on the way."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from locater.control.locater import LocAteR
from locater.control.stabilizers import Stabilizer
from locater.core.theory import propagation
from locater.engines import one_thread
from locater.errors import ConfigError, InputError, needing
from locater.files import held
from locater.models.live import find_attention
from locater.paper.lab.batches import IGNORED, Material, Source, generator, load_material
from locater.paper.lab.loss import is_native
from locater.paper.lab.model import Attention, Transformer, apply_stabilizer
from locater.paper.lab.run import (
    Checkpoint,
    DivergedError,
    Record,
    Run,
    RunFolder,
    describe_environment,
    rounded,
)
from locater.paper.lab.settings import TrainConfig
from locater.probe.probe import MeasuredHead, Probe, mean

with needing("accelerate", extra="lab"):
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

_WHOLE = StateDictOptions(full_state_dict=True)  # on every rank


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is: for a progress bar."""

    step: int
    steps: int
    loss: float
    entropy: float
    tokens_per_second: float


Report = Callable[[Progress], None]
Say = Callable[[str], None]


def train(
    config: TrainConfig,
    out: Path,
    *,
    data: str = "embedded",
    checkpoint_every: int = 1000,
    trackers: Sequence[str] = ("tensorboard",),
    report: Report = lambda _: None,
    say: Say = lambda _: None,
) -> Run:
    """Train one model, or go on with the run in `out`, bit by bit as if it had never stopped.

    Batches, dropout and masks depend on seed and step alone, so that a checkpoint needs no state
    of a random generator.  Under `accelerate launch` every process takes its share of each batch.
    """
    if checkpoint_every < 1:
        raise ConfigError(
            f"checkpoint_every must be 1 or more, got {checkpoint_every}.", hint="500 is usual."
        )
    accelerator = _accelerator(config, out, trackers)
    material = load_material(config, data)
    _check_processes(config, accelerator)
    material.model(config)  # settings that make no model are refused before a folder is made
    folder = RunFolder(out, is_writer=accelerator.is_main_process)
    with accelerator.main_process_first():
        folder.open(config, describe_environment(material.corpus))
    found = folder.finished() if (out / "config.json").exists() else None
    if found is not None:
        return found
    with held(out if accelerator.is_main_process else None):
        _go_on(
            _Loop(config, material, accelerator), folder, checkpoint_every, trackers, report, say
        )
    return folder.load()


def load_trained(path: Path, *, data: str = "embedded") -> tuple[Transformer, Material]:
    """The model of a run's newest checkpoint, ready to evaluate, and the run's batches."""
    config = Run.load(path).config
    material = load_material(config, data)
    model, _ = _stabilized_model(config, material)
    checkpoint, damage = RunFolder(path, is_writer=False).restore()
    if checkpoint is None:
        raise InputError(
            f"{path} holds no whole checkpoint. {' '.join(damage)}".strip(),
            hint="train it with `locater train`; published results carry no models.",
        )
    model.load_state_dict(checkpoint.model)
    return model.eval(), material


def _stabilized_model(config: TrainConfig, material: Material) -> tuple[Transformer, Stabilizer]:
    """The model before its first step, with what holds its attention."""
    model = material.model(config)
    return model, apply_stabilizer(
        model,
        config.stabilizer,
        max_logit=config.max_logit,
        decay=config.qk_decay,
        learning_rate=config.learning_rate,
    )


def _go_on(
    loop: _Loop,
    folder: RunFolder,
    checkpoint_every: int,
    trackers: Sequence[str],
    report: Report,
    say: Say,
) -> None:
    """From the newest whole checkpoint, or from the beginning, to the end."""
    accelerator = loop.accelerator
    checkpoint, damage = folder.restore()
    for sentence in damage:
        say(sentence)
    accelerator.wait_for_everyone()
    loop.start(checkpoint, folder)
    if checkpoint is not None:
        say(f"going on from step {checkpoint.step} of {loop.config.steps}")
    if trackers:
        kwargs = {"tensorboard": {"purge_step": loop.step}} if "tensorboard" in trackers else {}
        accelerator.init_trackers("tensorboard", init_kwargs=kwargs)
    with _own_dropout(accelerator.device):
        _run(loop, folder, checkpoint_every, report)
    accelerator.end_training()


def _run(loop: _Loop, folder: RunFolder, checkpoint_every: int, report: Report) -> None:
    """The steps that are left, measured and kept at their cadences."""
    if loop.is_over:  # killed between its last checkpoint and its last record
        loop.record(folder)
    while not loop.is_over:
        began, before = time.perf_counter(), loop.step
        try:
            loop.advance()
            if loop.is_due:
                loop.record(folder)
        except DivergedError as error:
            if before % checkpoint_every == 0:  # what was kept there led to this
                folder.discard(before)
            folder.append({"step": error.step, "end": "diverged", "layer": error.layer})
            raise
        if loop.step % checkpoint_every == 0 and not loop.is_over:
            loop.save(folder)
        loop.seconds += time.perf_counter() - began
        report(loop.progress())


def _check_processes(config: TrainConfig, accelerator: Any) -> None:
    """Refuse what would train otherwise than on one process."""
    if accelerator.num_processes == 1:
        return
    if config.covariance == "running":
        raise ConfigError(
            "covariance='running' keeps the tokens' covariance of one process.",
            hint="train on one process, or leave it out.",
        )
    if config.patience:
        raise ConfigError(
            "patience is kept by one process.", hint="leave it out, or train on one process."
        )
    is_sharded = str(accelerator.distributed_type).endswith("FSDP")
    if is_sharded and config.stabilizer not in ("none", "qk-weight-decay"):
        raise ConfigError(
            f"{config.stabilizer} does not work on parameters in shards.",
            hint="use DDP: models of the laboratory fit on every device.",
        )


class _Objective(nn.Module):
    """The loss as a forward pass, which is what DDP and FSDP2 watch over."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        dtype, device = self.model.loss_dtype, inputs.device.type
        if dtype is None or is_native(dtype, device):
            return self.model.loss(inputs, targets)
        with torch.autocast(device, dtype), RoundedProducts(dtype):
            return self.model.loss(inputs, targets)


_PRODUCTS = (
    functional.linear, functional.scaled_dot_product_attention, torch.matmul, Tensor.matmul,
    Tensor.__matmul__, Tensor.__rmatmul__,
)  # fmt: skip


class RoundedProducts(TorchFunctionMode):
    """Autocast for a CPU without instructions for its dtype.

    Factors and results of products are rounded, forward and backward, as autocast does; the
    products themselves are taken in float32, which is several times as fast there.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        wide = [
            one.to(self.dtype).float() if isinstance(one, Tensor) and one.is_floating_point()
            else one for one in args
        ]  # fmt: skip
        with torch.autocast("cpu", enabled=False):
            return func(*wide, **(kwargs or {})).to(self.dtype)


@dataclass(frozen=True, eq=False)
class _Best:
    """The model that scored best on all of valid."""

    step: int
    loss: float
    model: dict[str, Tensor]


@dataclass(eq=False)
class _Loop:
    """A model in training, with all that belongs to it."""

    config: TrainConfig
    material: Material
    accelerator: Any
    step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    last: Record = field(default_factory=dict)
    best: _Best | None = None
    """The best model so far, where the whole valid text is scored more than once."""

    def __post_init__(self) -> None:
        config, accelerator = self.config, self.accelerator
        if config.batch % accelerator.num_processes:
            raise ConfigError(
                f"a batch of {config.batch} does not divide among {accelerator.num_processes} "
                "processes.",
                hint="choose a batch that is a multiple of the number of processes.",
            )
        model, self.stabilizer = _stabilized_model(config, self.material)
        model.loss_dtype = torch.bfloat16 if config.precision == "bf16" else None
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(0.9, 0.999),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.objective, self.optimizer = accelerator.prepare(_Objective(model), optimizer)
        self.model: Transformer = accelerator.unwrap_model(self.objective).model
        self.regularizer: LocAteR | None = None
        if config.penalty is not None:
            self.regularizer = LocAteR(
                self.model,
                config.penalty,
                covariance="running" if config.covariance == "running" else None,
            )
        self.objective.train()

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole model."""
        return str(self.accelerator.distributed_type).endswith("FSDP")

    def advance(self) -> None:
        """One step: the penalty, the loss, one backward pass."""
        inputs, targets = self.share()
        seed_dropout(self.accelerator.device, self.config.seed, self.step,
                     self.accelerator.process_index)  # fmt: skip
        penalty = self.regularizer.penalty() if self.regularizer else 0.0
        loss = self.objective(inputs, targets)
        total = loss + penalty
        self.accelerator.backward(total)
        values = torch.stack([loss.detach(), total.detach()])
        if self.accelerator.num_processes > 1:
            values = self.accelerator.reduce(values, reduction="mean")
        value, whole = values.tolist()
        if not math.isfinite(whole):
            raise DivergedError(self.step, first_not_finite(self.objective, inputs, targets))
        if self.config.clip:
            self.accelerator.clip_grad_norm_(self.objective.parameters(), self.config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.stabilizer.after_step()
        self.step += 1
        self.loss_sum += value
        self.loss_count += 1

    def share(self) -> tuple[Tensor, Tensor]:
        """This process' part of the step's batch."""
        each = self.config.batch // self.accelerator.num_processes
        start = each * self.accelerator.process_index
        inputs, targets = self.material.train.at(self.step)
        device = self.accelerator.device
        return inputs[start : start + each].to(device), targets[start : start + each].to(device)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or patience is at its end."""
        if self.step == self.config.steps:
            return True
        if not self.config.patience or self.best is None:
            return False
        since = [at for at in self.config.evaluation_steps if self.best.step < at <= self.step]
        return len(since) >= self.config.patience

    @property
    def is_due(self) -> bool:
        """Whether this step is measured."""
        config = self.config
        return self.step % config.measure_every == 0 or self.step in config.evaluation_steps

    def record(self, folder: RunFolder) -> None:
        """Measure, and add what was found to the metrics and trackers.

        The last record says that the run is finished, so the last model is kept before it.
        """
        model = self._whole_model()
        record = self._measure(model) if self.accelerator.is_main_process else {}
        if self.is_over:
            self.save(folder)
        folder.append(record)
        self.accelerator.log(dict(_scalars(record)), step=self.step)
        self.last, self.loss_sum, self.loss_count = record, 0.0, 0

    def _measure(self, model: Transformer) -> Record:
        material = self.material
        meter = Meter(model, material.valid, material.whole_valid, self.accelerator.device)
        is_due = self.step // self.config.measure_every % self.config.predict_every == 0
        record: Record = {"step": self.step}
        if self.loss_count:
            record["train_loss"] = self.loss_sum / self.loss_count
        evaluated = {}
        if self.step in self.config.evaluation_steps:
            evaluated["whole_valid_loss"] = rounded(self._evaluate(meter))
        record.update(meter.measure(predicts=is_due or self.is_over) | evaluated)
        if record["valid_loss"] is None:  # no number
            raise DivergedError(self.step, first_not_finite(_Objective(model), *self.share()))
        if self.is_over:
            record |= rounded(self._judge(meter)) | {"end": "finished"}
        return record

    def _evaluate(self, meter: Meter) -> float:
        """The loss on all of valid; the best model so far is kept where there are several."""
        loss = meter.loss(self.material.whole_valid)
        if self.config.evaluations > 1 and (self.best is None or loss < self.best.loss):
            kept = {name: value.cpu().clone() for name, value in meter.model.state_dict().items()}
            self.best = _Best(self.step, loss, kept)
        return loss

    def _judge(self, meter: Meter) -> Record:
        """The best evaluation, and that model's loss on test, which is looked at only here."""
        if self.best is None:
            return {}
        found: Record = {"best_step": self.best.step, "best_valid_loss": self.best.loss}
        if self.material.whole_test is not None:
            now = {name: value.clone() for name, value in meter.model.state_dict().items()}
            meter.model.load_state_dict(self.best.model)
            found["test_loss"] = meter.loss(self.material.whole_test)
            meter.model.load_state_dict(now)
        return found

    def _whole_model(self) -> Transformer:
        """The model itself, or a copy of it where its parameters lie in shards."""
        if not self.is_sharded:
            return self.model
        copy = self.material.model(self.config)
        copy.load_state_dict(_without_prefix(get_model_state_dict(self.objective, options=_WHOLE)))
        return copy.to(self.accelerator.device)

    def start(self, checkpoint: Checkpoint | None, folder: RunFolder) -> None:
        """Take a checkpoint's place, or measure the model before its first step."""
        if checkpoint is None:
            self.record(folder)
            return
        model: dict[str, Any] = {f"model.{name}": v for name, v in checkpoint.model.items()}
        set_model_state_dict(self.objective, model, options=_WHOLE)
        inner = self.optimizer.optimizer
        # what is there now says how the parameters are grouped
        optimizer: dict[str, Any] = dict(
            get_optimizer_state_dict(self.objective, inner, options=_WHOLE)
        )
        optimizer["state"] = {}
        for name, value in _part(checkpoint.state, "optimizer.").items():
            parameter, _, moment = name.rpartition(".")
            optimizer["state"].setdefault(parameter, {})[moment] = value
        set_optimizer_state_dict(self.objective, inner, optimizer, options=_WHOLE)
        if self.regularizer is not None:
            self.regularizer.load_state_dict(_part(checkpoint.state, "regularizer."))
        self.step, self.seconds = checkpoint.step, checkpoint.carried["seconds"]
        self.loss_sum = checkpoint.carried["loss_sum"]
        self.loss_count = checkpoint.carried["loss_count"]
        if "best" in checkpoint.carried:
            step, loss = checkpoint.carried["best"]
            self.best = _Best(step, loss, _part(checkpoint.state, "best."))

    def save(self, folder: RunFolder) -> None:
        """Keep everything that the next step depends on."""
        model = _without_prefix(get_model_state_dict(self.objective, options=_WHOLE))
        optimizer: dict[str, Any] = dict(
            get_optimizer_state_dict(self.objective, self.optimizer.optimizer, options=_WHOLE)
        )
        state = {
            f"optimizer.{parameter}.{moment}": value.cpu()
            for parameter, moments in optimizer["state"].items()
            for moment, value in moments.items()
        }
        if self.regularizer is not None:
            running = self.regularizer.state_dict()
            state.update({f"regularizer.{name}": v.cpu() for name, v in running.items()})
        carried: Record = {
            "seconds": self.seconds, "loss_sum": self.loss_sum, "loss_count": self.loss_count
        }  # fmt: skip
        if self.best is not None:
            state.update({f"best.{name}": value for name, value in self.best.model.items()})
            carried["best"] = [self.best.step, self.best.loss]
        folder.save(self.step, model, state, carried, self.model.config.described)

    def progress(self) -> Progress:
        """Where we are."""
        entropy = self.last.get("entropy") or [math.nan]
        return Progress(
            step=self.step,
            steps=self.config.steps,
            loss=self.loss_sum / self.loss_count if self.loss_count else math.nan,
            entropy=sum(entropy) / len(entropy),
            tokens_per_second=self.config.batch * self.config.tokens * self.step
            / max(self.seconds, 1e-9),
        )  # fmt: skip


def seed_dropout(device: torch.device, *key: int) -> None:
    """Make the draws of the next step depend on the key alone."""
    drawn = generator("dropout", *key)
    if device.type == "cpu":
        torch.set_rng_state(drawn.get_state())
    else:
        own = torch.Generator(device).manual_seed(drawn.initial_seed())
        torch.get_device_module(device).set_rng_state(own.get_state(), device)


@contextmanager
def _own_dropout(device: torch.device) -> Iterator[None]:
    """Leave the caller's random state as it was."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type):
        yield


@torch.no_grad()
def first_not_finite(model: nn.Module, inputs: Tensor, targets: Tensor) -> str:
    """The first module, in the order of the forward pass, that makes NaN or infinite values."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                found.append(name)

        return look

    handles = [
        module.register_forward_hook(watch(name.removeprefix("module.").removeprefix("model.")))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        model(inputs, targets)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the output layer's loss or the penalty"


def _accelerator(config: TrainConfig, out: Path, trackers: Sequence[str]) -> Any:
    precision = "bf16" if config.precision == "bf16" else "no"
    shared = AcceleratorState._shared_state
    if shared and shared.get("_mixed_precision") != precision:
        AcceleratorState._reset_state()  # several runs in one process may differ in precision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Accelerator(
            mixed_precision=precision, log_with=list(trackers) or None, project_dir=str(out)
        )


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    """What a tracker can draw: numbers, and one number per layer."""
    for name, value in record.items():
        if isinstance(value, float):
            yield name, value
            if name.endswith("_loss"):
                yield name.replace("_loss", "_perplexity"), math.exp(min(value, 50.0))
        elif isinstance(value, list) and all(isinstance(part, float) for part in value):
            yield from ((f"{name}/layer_{layer}", part) for layer, part in enumerate(value))


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _without_prefix(state: dict[str, Any]) -> dict[str, Tensor]:
    """The model's own names; copies, for tied weights share memory and files do not."""
    return {name.removeprefix("model."): value.cpu().clone() for name, value in state.items()}


@dataclass(eq=False)
class Meter:
    """Measures one model at a cadence, without a trace in its training.

    It is always the first batch of `valid`; `loss` is that of a whole part of the data.  The
    exact prediction of ρ takes the means, kernel and covariance of the tokens that really reach
    the attention.
    """

    model: Transformer
    valid: Source
    whole: Source
    """All of valid: for the share of pictures that are told right."""
    device: torch.device

    @torch.no_grad()
    def loss(self, source: Source) -> float:
        """Mean loss per target of a whole part of the data, in evaluation mode."""
        with self._evaluating():
            return self._loss(source, source.steps_per_epoch)

    @torch.no_grad()
    def measure(self, *, predicts: bool = False) -> Record:
        """One record of the model as it is now, in evaluation mode."""
        keep = sys.maxsize if predicts else 0
        probe = Probe(self.model, queries="all", profiles="all", keep=keep, strict=False)
        with self._evaluating():
            with probe:
                record: Record = {"valid_loss": self._loss(self.valid, 1)}
            if not math.isfinite(record["valid_loss"]):
                return rounded(record)  # nothing else is a number either
            if self.model.config.task == "vision":
                record["accuracy"] = self._accuracy()
            record.update(self._spectra(with_eigenvalues=predicts))
            record.update(_attention(probe))
            if predicts and not self._is_bent():
                record["predicted_rho"] = rounded(self._predicted(probe), 3)
            return rounded(record)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    def _loss(self, source: Source, steps: int) -> float:
        """Mean loss per target."""
        total, count = 0.0, 0
        for step in range(steps):
            inputs, targets = (part.to(self.device) for part in source.at(step))
            size = int((targets != IGNORED).sum())
            total += self.model.loss(inputs, targets).item() * size
            count += size
        return total / count

    def _accuracy(self) -> float:
        """The share of pictures that are told right."""
        right, count = 0, 0
        for step in range(self.whole.steps_per_epoch):
            inputs, targets = (part.to(self.device) for part in self.whole.at(step))
            guess = self.model.output(self.model(inputs).mean(1)).argmax(-1)
            right += int((guess == targets).sum())
            count += len(targets)
        return right / count

    def _spectra(self, *, with_eigenvalues: bool) -> Record:
        record: dict[str, list[Any]] = {}
        with one_thread():
            for attention in find_attention(self.model):
                form = attention.form().to(torch.float64, torch.device("cpu"))
                spectrum = form.spectrum()
                for name in ("trace", "trace_of_square", "frobenius_squared", "variance", "r"):
                    value = getattr(spectrum, name).mean().item()
                    record.setdefault(name, []).append(value)
                if with_eigenvalues:
                    values = spectrum.eigenvalues.flatten()
                    pairs = torch.view_as_real(values).tolist()
                    record.setdefault("eigenvalues", []).append(rounded(pairs, 4))
        return record

    def _is_bent(self) -> bool:
        """Whether a norm or a cap stands in between: then no fixed W_QK makes the logits."""
        attentions = [one for one in self.model.modules() if isinstance(one, Attention)]
        return any(
            not isinstance(one.q_norm, nn.Identity) or hasattr(one, "soft_cap_limit")
            for one in attentions
        )

    def _predicted(self, probe: Probe) -> list[list[float]]:
        """ρ of every layer, exact, for Gaussian tokens with the moments of those measured."""
        with one_thread():
            return [
                propagation(
                    attention.form().to(torch.float64, torch.device("cpu")),
                    probe.process(attention.layout.name),
                )
                .rho.mean(0)
                .tolist()
                for attention in find_attention(self.model)
            ]


def _attention(probe: Probe) -> Record:
    """What a probe saw, one number or profile per layer: the average over its heads."""
    layers: dict[str, list[MeasuredHead]] = {}
    for head in probe.records:
        layers.setdefault(head.name, []).append(head)
    rho = [torch.stack([head.last_rho.rho for head in heads]) for heads in layers.values()]
    return {
        "entropy": [mean(head.entropy_per_query for head in heads) for heads in layers.values()],
        "max_logit": [max(head.max_logit for head in heads) for heads in layers.values()],
        "rank": [rank.effective_rank for rank in probe.rank],
        "rho": rounded([one.mean(0).tolist() for one in rho], 3),
    }
