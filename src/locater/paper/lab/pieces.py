"""Vocabularies of pieces of words (byte-level BPE), learned by `tokenizers` and kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from locater.errors import ConfigError, MissingExtraError
from locater.files import write_file
from locater.paper.lab.corpus import SPLITS

EOS = "<eos>"
UNKNOWN = "<unk>"
_RECIPE = 1  # counts changes to what is learned, so that what another recipe stored is not read
_LEAST = 258  # every byte, <eos> and <unk>
Pieces = tuple[tuple[str, ...], dict[str, Tensor]]


def encode_pieces(texts: Mapping[str, str], size: int | None, cache: Path) -> Pieces:
    """Learn a vocabulary from train and number the pieces of all three texts with it."""
    if size is None or size <= _LEAST:
        raise ConfigError(
            f"a vocabulary of pieces needs a size above {_LEAST}, got {size}.",
            hint="2048 to 32768 is usual.",
        )
    total = hashlib.sha256(f"{_RECIPE} {size} {_version()}".encode())
    for split in SPLITS:
        total.update(hashlib.sha256(texts[split].encode()).digest())
    path = cache / f"bpe-{size}-{total.hexdigest()[:16]}.safetensors"
    stored = _load(path)
    if stored is None:
        stored = _learn(texts, size)
        _store(path, *stored)
    return stored


def _version() -> str:
    try:
        import tokenizers
    except ImportError as error:  # pragma: no cover - the dev environment has it
        raise MissingExtraError("tokenizers", extra="lab") from error
    return str(tokenizers.__version__)


def _learn(texts: Mapping[str, str], size: int) -> Pieces:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS, UNKNOWN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = {
        split: [" ".join(line.split()) for line in texts[split].splitlines()] for split in SPLITS
    }
    tokenizer.train_from_iterator(lines["train"], trainer)
    learned = tokenizer.get_vocab_size()
    if learned < size:
        raise ConfigError(
            f"a vocabulary of {size} pieces cannot be had from this text, which gives {learned}.",
            hint="choose a smaller size or more text.",
        )
    names = sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    end = tokenizer.token_to_id(EOS)
    ids = {}
    for split in SPLITS:
        encoded = tokenizer.encode_batch_fast(lines[split])
        ids[split] = torch.tensor([one for line in encoded for one in (*line.ids, end)])
    return tuple(name for name, _ in names), ids


def _store(path: Path, words: tuple[str, ...], ids: Mapping[str, Tensor]) -> None:
    metadata = {"vocabulary": json.dumps(words)}
    write_file(path, save({split: ids[split].int() for split in SPLITS}, metadata))


def _load(path: Path) -> Pieces | None:
    """What was stored, or nothing where it is missing or damaged: then it is learned again."""
    try:
        with safe_open(path, "pt") as file:
            words = tuple(json.loads(file.metadata()["vocabulary"]))
            ids = {split: file.get_tensor(split).long() for split in SPLITS}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
    fits = all(
        part.numel() and part.min() >= 0 and part.max() < len(words) for part in ids.values()
    )
    return (words, ids) if fits else None
