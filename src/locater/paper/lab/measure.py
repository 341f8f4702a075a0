"""What is measured in training: losses, eigenspectrum, entropy, ρ by position, token rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.core.process import TokenProcess
from locater.core.theory import attention_entropy, propagates, propagation
from locater.engines import one_thread
from locater.models.live import find_attention
from locater.paper.lab.batches import IGNORED, Source
from locater.paper.lab.model import Attention, Transformer
from locater.paper.lab.run import Record, rounded


@dataclass(eq=False)
class _Layer:
    """What one attention did with one batch."""

    tokens: Tensor
    logits: Float[Tensor, "batch heads query key"]
    is_causal: bool

    @property
    def seen(self) -> Float[Tensor, "batch heads query key"]:
        """The logits that the softmax sees."""
        if not self.is_causal:
            return self.logits
        size = self.logits.shape[-1]
        future = torch.ones(size, size, dtype=torch.bool, device=self.logits.device).triu(1)
        return self.logits.masked_fill(future, -math.inf)

    @property
    def entropy(self) -> float:
        """Attention entropy in nats, averaged over all queries."""
        return attention_entropy(self.seen.softmax(-1)).mean().item()

    @property
    def max_logit(self) -> float:
        """The largest logit of all."""
        return self.seen.amax().item()

    @property
    def rho(self) -> list[float]:
        """How often each token's gate is open, for the last token's query."""
        return propagates(self.logits[:, :, -1]).float().mean((0, 1)).tolist()

    @property
    def rank(self) -> float:
        """(Σs²)²/Σs⁴ of each sequence's tokens, their singular values s: 1 after a collapse."""
        gram = self.tokens.double() @ self.tokens.double().mT
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        return (trace.square() / gram.square().sum((-2, -1))).mean().item()


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
    _layers: list[_Layer] = field(default_factory=list)

    @torch.no_grad()
    def loss(self, source: Source) -> float:
        """Mean loss per target of a whole part of the data, in evaluation mode."""
        with self._evaluating():
            return self._loss(source, source.steps_per_epoch)

    @torch.no_grad()
    def measure(self, *, predicts: bool = False) -> Record:
        """One record of the model as it is now, in evaluation mode."""
        with self._evaluating():
            with self._watching():
                record: Record = {"valid_loss": self._loss(self.valid, 1)}
            if not math.isfinite(record["valid_loss"]):
                return rounded(record)  # nothing else is a number either
            if self.model.config.task == "vision":
                record["accuracy"] = self._accuracy()
            record.update(self._spectra(with_eigenvalues=predicts))
            record["entropy"] = [layer.entropy for layer in self._layers]
            record["max_logit"] = [layer.max_logit for layer in self._layers]
            record["rank"] = [layer.rank for layer in self._layers]
            record["rho"] = rounded([layer.rho for layer in self._layers], 3)
            if predicts and not self._is_bent():
                record["predicted_rho"] = rounded(self._predicted(), 3)
            return rounded(record)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self._layers.clear()
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

    def _predicted(self) -> list[list[float]]:
        """ρ of every layer, exact, for Gaussian tokens with the moments of those measured."""
        with one_thread():
            return [
                propagation(
                    attention.form().to(torch.float64, torch.device("cpu")),
                    TokenProcess.from_samples(layer.tokens.double().cpu()),
                )
                .rho.mean(0)
                .tolist()
                for attention, layer in zip(find_attention(self.model), self._layers, strict=True)
            ]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Note tokens, queries and keys of every attention in the forward passes within."""
        undo = []
        for module in self.model.modules():
            if isinstance(module, Attention):
                seen: list[Tensor] = []

                def enter(
                    _: nn.Module, args: tuple[Tensor, ...], seen: list[Tensor] = seen
                ) -> None:
                    seen[:] = args

                def watch(
                    query: Tensor,
                    key: Tensor,
                    seen: list[Tensor] = seen,
                    module: Attention = module,
                ) -> None:
                    logits = module.logits(query, key)
                    self._layers.append(_Layer(seen[0], logits, module.is_causal))

                undo.append((module, module.register_forward_pre_hook(enter), watch))
                module.watchers.append(watch)
        try:
            yield
        finally:
            for module, handle, watch in undo:
                handle.remove()
                module.watchers.remove(watch)
