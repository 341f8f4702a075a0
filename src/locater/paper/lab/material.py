"""The batches and the model of a run, from its settings and a place where the data lies."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from locater.errors import ConfigError
from locater.paper.lab.batches import Batches, ImageBatches, MaskedBatches, generator, load_digits
from locater.paper.lab.data import Corpus, load_corpus
from locater.paper.lab.measure import Source
from locater.paper.lab.model import Shape, Transformer, TransformerConfig
from locater.paper.lab.settings import TrainConfig

DIGITS = "digits"
_PATCH = 2
_EVALUATED = 64
"""Sequences in a batch of valid, whatever the training's batch."""


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
    return source if source == "embedded" else _corpus_name(source)


def _corpus_name(source: str) -> str:
    return source.removeprefix("hub:") if source.startswith("hub:") else Path(source).resolve().name


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

    def batches(part: str, seed: int | None, batch: int) -> Batches:
        tokens, length = getattr(corpus, part), config.tokens
        if config.task == "masked":
            return MaskedBatches(tokens, vocabulary=size, length=length, batch=batch, seed=seed)
        return Batches(tokens, length=length, batch=batch, seed=seed)

    return Material(
        train=batches("train", config.seed, config.batch),
        valid=batches("valid", 0, _EVALUATED),
        whole_valid=batches("valid", None, _EVALUATED),
        whole_test=batches("test", None, _EVALUATED),
        vocabulary=size,
        length=config.tokens,
        corpus={
            "name": config.corpus,
            **({"share": config.share} if config.share < 1 else {}),
            "digest": corpus.digest,
            "vocabulary": size,
            "train": corpus.train.numel(),
            "valid": corpus.valid.numel(),
        },
    )


@lru_cache(maxsize=4)
def _corpus(source: str, vocabulary: Any, size: int | None, share: float) -> Corpus:
    return load_corpus(source, vocabulary=vocabulary, size=size, share=share)


def _digits(config: TrainConfig) -> Material:
    digits = load_digits(0, patch=_PATCH)
    train = ImageBatches(digits.train, digits.train_labels, batch=config.batch, seed=config.seed)
    valid, whole = (
        ImageBatches(digits.valid, digits.valid_labels, batch=_EVALUATED, seed=seed)
        for seed in (0, None)
    )
    return Material(
        train=train,
        valid=valid,
        whole_valid=whole,
        whole_test=None,
        vocabulary=10,
        length=digits.train.shape[1],
        corpus={"name": DIGITS, "train": len(digits.train), "valid": len(digits.valid)},
    )
