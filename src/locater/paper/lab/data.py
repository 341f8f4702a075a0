"""Text as token ids, from a folder, a file, the hub or Python itself; batches without state."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from locater.errors import ConfigError, InputError
from locater.paper.lab.batches import IGNORED as IGNORED
from locater.paper.lab.batches import Batches as Batches
from locater.paper.lab.batches import Digits as Digits
from locater.paper.lab.batches import ImageBatches as ImageBatches
from locater.paper.lab.batches import MaskedBatches as MaskedBatches
from locater.paper.lab.batches import load_digits as load_digits
from locater.paper.lab.corpus import SPLITS, embedded_text, tokenize
from locater.paper.lab.hub import hub_text
from locater.paper.lab.pieces import EOS, UNKNOWN, encode_pieces

Vocabulary = Literal["word", "bpe"]
_RARE = 3  # a word seen less often is unknown, as the makers of WikiText decided
_FILES = ("{}.txt", "wiki.{}.tokens", "{}.tokens", "{}")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in three parts as token ids, and what the ids stand for."""

    name: str
    train: Int64[Tensor, " train"]
    valid: Int64[Tensor, " valid"]
    test: Int64[Tensor, " test"]
    vocabulary: tuple[str, ...]
    digest: str
    """SHA-256 of the vocabulary and the ids: two corpora with the same one are the same."""


def cache_folder() -> Path:
    """Where texts and vocabularies are kept between runs; `LOCATER_CACHE` moves it."""
    if "LOCATER_CACHE" in os.environ:
        return Path(os.environ["LOCATER_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "locater"


def load_corpus(
    source: str | Path = "embedded",
    *,
    vocabulary: Vocabulary = "word",
    size: int | None = None,
    share: float = 1.0,
) -> Corpus:
    """Read a text and number its tokens, `<eos>` at the end of every line.

    `source` is `embedded` (the prose of the running Python), `hub:wikitext-2`, a folder that holds
    train, valid and test (`train.txt` or `wiki.train.tokens`; words are what spaces separate), or a
    plain text file (words and punctuation are told apart; its first nine tenths are train).

    `size` cuts the vocabulary, by frequency in train; the rest is `<unk>`.  Without it a word
    vocabulary keeps every word of a text that brings its own `<unk>`, else every word seen three
    times.  `bpe` learns pieces of words from train and needs a size.

    `share` keeps the first lines of train alone, and learns the vocabulary from them.
    """
    name, texts = _read(source)
    if share < 1:
        lines = texts["train"].splitlines(keepends=True)
        texts["train"] = "".join(lines[: max(1, round(share * len(lines)))])
    for split in SPLITS:
        if not texts[split].split():
            raise InputError(
                f"the {split} text of {name} is empty.",
                hint="each of train, valid and test needs at least one line of words.",
            )
    if vocabulary == "word":
        words, ids = _word_ids(texts, size)
    elif vocabulary == "bpe":
        words, ids = encode_pieces(texts, size, cache_folder())
    else:
        raise ConfigError(f"unknown vocabulary {vocabulary!r}.", hint="use 'word' or 'bpe'.")
    return Corpus(
        name=name, vocabulary=words, digest=_digest(words, ids), **{s: ids[s] for s in SPLITS}
    )


def _read(source: str | Path) -> tuple[str, dict[str, str]]:
    if str(source) == "embedded":
        return "embedded", embedded_text(cache_folder())
    if str(source).startswith("hub:"):
        return str(source), hub_text(str(source).removeprefix("hub:"))
    path = Path(source)
    try:
        if path.is_dir():
            return path.resolve().name, {split: _in_folder(path, split) for split in SPLITS}
        if path.is_file():
            return path.name, _in_parts(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not text in UTF-8: {error.reason} at byte {error.start}.",
            hint="convert it first: iconv -f latin1 -t utf-8.",
        ) from error
    raise InputError(
        f"no text at {source}.",
        hint="give 'embedded', 'hub:wikitext-2', a text file, or a folder with train.txt, "
        "valid.txt and test.txt.",
    )


def _in_folder(folder: Path, split: str) -> str:
    for name in _FILES:
        path = folder / name.format(split)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    seen = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise InputError(
        f"{folder} has no {split} text; it holds {seen}.",
        hint=f"it needs {_FILES[0].format(split)} or {_FILES[1].format(split)}.",
    )


def _in_parts(text: str) -> dict[str, str]:
    """A file's lines in tokens: nine tenths for train, then a twentieth each."""
    lines = [" ".join(tokenize(line)) for line in text.splitlines() if line.strip()]
    if len(lines) < 3:
        raise InputError(
            f"a text of {len(lines)} lines cannot be split into train, valid and test.",
            hint="it needs at least three lines; a paragraph a line is usual.",
        )
    rest = max(1, len(lines) // 20)
    parts = lines[: -2 * rest], lines[-2 * rest : -rest], lines[-rest:]
    return {split: "\n".join(part) for split, part in zip(SPLITS, parts, strict=True)}


def _word_ids(
    texts: Mapping[str, str], size: int | None
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    streams = {split: list(_words(text)) for split, text in texts.items()}
    counts = Counter(streams["train"])
    special = [EOS, UNKNOWN]
    ranked = sorted(counts.keys() - set(special), key=lambda word: (-counts[word], word))
    if size is None and UNKNOWN not in counts:
        ranked = [word for word in ranked if counts[word] >= _RARE]
    elif size is not None:
        _check_size(size, len(special), len(special) + len(ranked))
        ranked = ranked[: size - len(special)]
    words = (*special, *ranked)
    index = {word: place for place, word in enumerate(words)}
    unknown = index[UNKNOWN]
    return words, {
        split: torch.tensor([index.get(word, unknown) for word in stream])
        for split, stream in streams.items()
    }


def _check_size(size: int, least: int, most: int) -> None:
    if not least < size <= most:
        raise ConfigError(
            f"a vocabulary of {size} words cannot be had from this text, which has {most}.",
            hint=f"choose a size from {least + 1} to {most}, or leave it out.",
        )


def _words(text: str) -> Iterable[str]:
    for line in text.splitlines():
        yield from line.split()
        yield EOS


def _digest(words: tuple[str, ...], ids: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256("\n".join(words).encode())
    for split in SPLITS:
        total.update(f"\n{split} {ids[split].numel()}\n".encode())
        total.update(ids[split].numpy().astype("<i8").tobytes())
    return total.hexdigest()
