"""Batches without state: step and seed decide them, so that a resumed run sees the same ones.

`load_material` makes them, and the model before its first step, from a run's settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from locater.errors import ConfigError, InputError, needing
from locater.paper.lab.model import Shape, Transformer, TransformerConfig
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.text import Corpus, load_corpus

IGNORED = -100
"""The target of a token that the loss leaves out."""
DIGITS = "digits"
_PATCH = 2
_EVALUATED = 64
"""Sequences in a batch of valid, whatever the training's batch."""


def generator(*key: int | str) -> torch.Generator:
    """A random generator that depends on the key alone."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Source:
    """Inputs and targets by step: one shuffled epoch after the other, every item once in each.

    A batch that an epoch cannot fill goes on into the next one.  Without a seed the items come in
    their own order and the last batch of the epoch is smaller: this is how a text is evaluated.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, *, batch: int = 64, seed: int | None
    ) -> None:
        if batch < 1:
            raise ConfigError(f"batch must be one or more, got {batch}.", hint="64 in the paper.")
        self.inputs, self.targets, self.batch, self.seed = inputs, targets, batch, seed
        self._epoch: tuple[int, Tensor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every item has been seen."""
        return -(-len(self.inputs) // self.batch)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a step, counted from 0."""
        chosen = self.indices(step)
        return self.inputs[chosen], self.targets[chosen]

    def indices(self, step: int) -> Int64[Tensor, " batch"]:
        """The items of a step."""
        items = len(self.inputs)
        if self.seed is None:
            start = step % self.steps_per_epoch * self.batch
            return torch.arange(start, min(start + self.batch, items))
        place = torch.arange(step * self.batch, (step + 1) * self.batch)
        parts = []
        for epoch in range(step * self.batch // items, int(place[-1]) // items + 1):
            inside = place[place // items == epoch] % items
            parts.append(self._shuffled(epoch)[inside])
        return torch.cat(parts)

    def _shuffled(self, epoch: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            source = generator("order", self.seed or 0, epoch)
            self._epoch = epoch, torch.randperm(len(self.inputs), generator=source)
        return self._epoch[1]


class Batches(Source):
    """Blocks of a text and, as targets, the same blocks one token later.

    >>> batches = Batches(torch.arange(13), length=4, batch=2, seed=None)
    >>> inputs, targets = batches.at(0)
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3, 4], [5, 6, 7, 8]])
    """

    def __init__(
        self,
        tokens: Int64[Tensor, " tokens"],
        *,
        length: int = 64,
        batch: int = 64,
        seed: int | None,
    ) -> None:
        blocks = (tokens.numel() - 1) // length if length > 0 else 0
        if blocks < 1:
            raise InputError(
                f"a text of {tokens.numel()} tokens has no block of {length} and one to predict.",
                hint="choose a length from 1 to the number of tokens less one, or more text.",
            )
        cut = tokens[: blocks * length + 1]
        inputs, targets = (part.view(blocks, length) for part in (cut[:-1], cut[1:]))
        super().__init__(inputs, targets, batch=batch, seed=seed)


class MaskedBatches(Batches):
    """Blocks in which some tokens are hidden and, as targets, what was hidden (BERT).

    Of every block 15 % are chosen, in number exactly; of those 80 % become the mask, whose id is
    the vocabulary's size, 10 % a random token, and 10 % stay.  All other targets are `IGNORED`.
    """

    def __init__(
        self,
        tokens: Int64[Tensor, " tokens"],
        *,
        vocabulary: int,
        length: int = 64,
        batch: int = 64,
        seed: int | None,
    ) -> None:
        super().__init__(tokens, length=length, batch=batch, seed=seed)
        self.vocabulary, self.hidden = vocabulary, max(1, round(0.15 * length))

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a step, counted from 0."""
        tokens = self.inputs[self.indices(step)]
        place = step % self.steps_per_epoch if self.seed is None else step
        source = generator("mask", str(self.seed), place)
        draws = torch.rand(tokens.shape, generator=source)
        chosen = draws.argsort(dim=1).argsort(dim=1) < self.hidden
        fate = torch.rand(tokens.shape, generator=source)
        other = torch.randint(self.vocabulary, tokens.shape, generator=source)
        shown = torch.where(fate < 0.8, self.vocabulary, torch.where(fate < 0.9, other, tokens))
        return torch.where(chosen, shown, tokens), torch.where(chosen, tokens, IGNORED)


Pictures = tuple[Float[Tensor, "pictures patches pixels"], Int64[Tensor, " pictures"]]


def load_digits(seed: int, *, patch: int = _PATCH) -> dict[str, Pictures]:
    """scikit-learn's 1,797 handwritten digits of 8 × 8 pixels, cut in patches, and their labels.

    Pixels go from 0 to 1; patches of 2 × 2 make sequences of 16, patches of 4 × 4 sequences of 4;
    a fifth, drawn by the seed, is `valid` and the rest `train`.
    """
    if patch not in (1, 2, 4):
        raise ConfigError(f"8 x 8 pixels are not cut in patches of {patch}.", hint="use 2 or 4.")
    with needing("scikit-learn", extra="lab"):
        from sklearn import datasets  # type: ignore[import-untyped]
    images, labels = datasets.load_digits(return_X_y=True)
    pixels = torch.as_tensor(images, dtype=torch.float32).div(16).view(-1, 8 // patch, patch, 8)
    cut = pixels.unflatten(3, (8 // patch, patch)).transpose(2, 3).flatten(3).flatten(1, 2)
    numbers = torch.as_tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(cut), generator=generator("digits", seed))
    parts = {"train": order[len(cut) // 5 :], "valid": order[: len(cut) // 5]}
    return {name: (cut[part], numbers[part]) for name, part in parts.items()}


@dataclass(frozen=True, eq=False)
class Material:
    """Batches to train on and to measure with, and what they were made from."""

    train: Source
    valid: Source
    """In a fixed random order, so that the first batches stand for all of them."""
    whole_valid: Source
    """In the text's own order, each block once."""
    whole_test: Source | None
    """The same of test; None where the data has no such part."""
    vocabulary: int
    length: int
    corpus: dict[str, Any]

    def model(self, config: TrainConfig) -> Transformer:
        """The model of these settings, as it is before the first step."""
        shape = {field.name: getattr(config, field.name) for field in fields(Shape)}
        full = TransformerConfig(
            **shape, vocabulary=self.vocabulary, length=self.length, patch=_PATCH**2
        )
        return Transformer(full, generator("model", config.seed))


def corpus_name(source: str, task: str = "causal") -> str:
    """The name by which settings call a text: `hub:wikitext-2` and a folder of it are one."""
    if task == "vision":
        return DIGITS
    if source == "embedded" or source.startswith("hub:"):
        return source.removeprefix("hub:")
    return Path(source).resolve().name


def load_material(config: TrainConfig, source: str) -> Material:
    """Read the data; a text other than the one that the settings name is an error."""
    if config.task == "vision":
        return _digits(config)
    if corpus_name(source) != config.corpus:
        raise ConfigError(
            f"the settings ask for the text {config.corpus!r}, and {source} is another.",
            hint="name the text in the settings, or give --data where it lies.",
        )
    corpus = _corpus(source, config.vocabulary, config.vocabulary_size, config.share)
    size = len(corpus.vocabulary)

    def batches(part: str, *, batch: int, seed: int | None) -> Source:
        tokens, length = getattr(corpus, part), config.tokens
        if config.task == "masked":
            return MaskedBatches(tokens, vocabulary=size, length=length, batch=batch, seed=seed)
        return Batches(tokens, length=length, batch=batch, seed=seed)

    about = {
        "name": config.corpus,
        **({"share": config.share} if config.share < 1 else {}),
        "digest": corpus.digest,
        "vocabulary": size,
        "train": corpus.train.numel(),
        "valid": corpus.valid.numel(),
    }
    test = batches("test", batch=_EVALUATED, seed=None)
    return _material(config, batches, test, vocabulary=size, length=config.tokens, corpus=about)


@lru_cache(maxsize=4)
def _corpus(source: str, vocabulary: Any, size: int | None, share: float) -> Corpus:
    return load_corpus(source, vocabulary=vocabulary, size=size, share=share)


def _digits(config: TrainConfig) -> Material:
    digits = load_digits(0)

    def batches(part: str, *, batch: int, seed: int | None) -> Source:
        return Source(*digits[part], batch=batch, seed=seed)

    length = digits["train"][0].shape[1]
    about = {"name": DIGITS, **{part: len(labels) for part, (_, labels) in digits.items()}}
    return _material(config, batches, None, vocabulary=10, length=length, corpus=about)


def _material(
    config: TrainConfig, batches: Callable[..., Source], test: Source | None, **about: Any
) -> Material:
    return Material(
        train=batches("train", batch=config.batch, seed=config.seed),
        valid=batches("valid", batch=_EVALUATED, seed=0),
        whole_valid=batches("valid", batch=_EVALUATED, seed=None),
        whole_test=test,
        **about,
    )
