"""What is measured in training: losses, eigenspectra, and what a probe sees of attention."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from locater.core.theory import propagation
from locater.engines import one_thread
from locater.models.live import find_attention
from locater.paper.lab.batches import IGNORED, Source
from locater.paper.lab.model import Attention, Transformer
from locater.paper.lab.run import Record, rounded
from locater.probe.probe import MeasuredHead, Probe, mean


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
            not isinstance(one.q_norm, nn.Identity) or one.soft_cap is not None
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
