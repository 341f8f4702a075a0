"""Text as token ids: from a folder, a file, the hub, or the prose that every Python carries."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from locater.errors import ConfigError, InputError, LocaterError, needing, unknown
from locater.files import write_file

Vocabulary = Literal["word", "bpe"]
Encoded = tuple[tuple[str, ...], dict[str, Tensor]]
"""What ids stand for, and the ids of each part."""
SPLITS = ("train", "valid", "test")
EOS, UNKNOWN = "<eos>", "<unk>"
_FILES = ("{}.txt", "wiki.{}.tokens", "{}.tokens", "{}")
_RARE = 3  # a word seen less often is unknown, as the makers of WikiText decided
_LEAST_PIECES = 258  # every byte, <eos> and <unk>
_PIECES_VERSION = 1  # counts changes to what is learned: stored pieces of another are not read
_PROSE_VERSION = 1  # counts changes to the cleaning, for stored texts likewise


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
        raise unknown("vocabulary", vocabulary, ("word", "bpe"))
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


def _word_ids(texts: Mapping[str, str], size: int | None) -> Encoded:
    streams = {split: list(_words(text)) for split, text in texts.items()}
    counts = Counter(streams["train"])
    special = [EOS, UNKNOWN]
    ranked = sorted(counts.keys() - set(special), key=lambda word: (-counts[word], word))
    if size is None and UNKNOWN not in counts:
        ranked = [word for word in ranked if counts[word] >= _RARE]
    elif size is not None:
        least, most = len(special) + 1, len(special) + len(ranked)
        if not least <= size <= most:
            raise ConfigError(
                f"a vocabulary of words from this text has {least} to {most}, got {size}.",
                hint="choose a size in that range, or leave it out to keep all.",
            )
        ranked = ranked[: size - len(special)]
    words = (*special, *ranked)
    index = {word: place for place, word in enumerate(words)}
    rare = index[UNKNOWN]
    return words, {
        split: torch.tensor([index.get(word, rare) for word in stream])
        for split, stream in streams.items()
    }


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


def encode_pieces(texts: Mapping[str, str], size: int | None, cache: Path) -> Encoded:
    """Learn a vocabulary from train and number the pieces of all three texts with it."""
    if size is None or size <= _LEAST_PIECES:
        raise ConfigError(
            f"a vocabulary of pieces needs a size above {_LEAST_PIECES}, got {size}.",
            hint="2048 to 32768 is usual.",
        )
    total = hashlib.sha256(f"{_PIECES_VERSION} {size} {_tokenizers_version()}".encode())
    for split in SPLITS:
        total.update(hashlib.sha256(texts[split].encode()).digest())
    path = cache / f"bpe-{size}-{total.hexdigest()[:16]}.safetensors"
    stored = _stored_pieces(path)
    if stored is None:
        stored = _learned_pieces(texts, size)
        _store_pieces(path, *stored)
    return stored


def _tokenizers_version() -> str:
    with needing("tokenizers", extra="lab"):
        import tokenizers
    return str(tokenizers.__version__)


def learned_tokenizer(text: str, size: int) -> Any:
    """Pieces of words, learned from a text's lines."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS, UNKNOWN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(text), trainer)
    learned = tokenizer.get_vocab_size()
    if learned < size:
        raise ConfigError(
            f"a vocabulary of pieces from this text has at most {learned}, got {size}.",
            hint="choose a smaller size or more text.",
        )
    return tokenizer


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def _learned_pieces(texts: Mapping[str, str], size: int) -> Encoded:
    tokenizer = learned_tokenizer(texts["train"], size)
    names = sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    end = tokenizer.token_to_id(EOS)
    ids = {}
    for split in SPLITS:
        encoded = tokenizer.encode_batch_fast(_lines(texts[split]))
        ids[split] = torch.tensor([one for line in encoded for one in (*line.ids, end)])
    return tuple(name for name, _ in names), ids


def _store_pieces(path: Path, words: tuple[str, ...], ids: Mapping[str, Tensor]) -> None:
    metadata = {"vocabulary": json.dumps(words)}
    write_file(path, save({split: ids[split].int() for split in SPLITS}, metadata))


def _stored_pieces(path: Path) -> Encoded | None:
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


@dataclass(frozen=True, kw_only=True)
class HubText:
    """Where a text lies on the hub, and the SHA-256 of its lines' words."""

    path: str
    config: str | None
    digests: dict[str, str]


HUB = {
    "wikitext-2": HubText(
        path="Salesforce/wikitext",
        config="wikitext-2-v1",
        digests={
            "train": "f7ee69acf5cc3fd2321929d3e32dd6defd8199abe0cb95063b2b9f092584f96f",
            "valid": "4427e8fc24d5ceaaff4f1d9ee42f4e82172572b107d6a4e1f32d84fa7913c3ff",
            "test": "f68796e87c3250872a5a82da5027c4f75494ca617fbad67e36acce8a057ff3e8",
        },
    )
}


def text_digest(lines: Iterable[str]) -> str:
    """SHA-256 of a text whose words are separated by one space and whose lines by one newline."""
    total = hashlib.sha256()
    for line in lines:
        total.update((" ".join(line.split()) + "\n").encode())
    return total.hexdigest()


def hub_text(name: str, *, known: dict[str, HubText] | None = None) -> dict[str, str]:
    """Download a text, or take it from the cache of `datasets`, and check that it is that text."""
    known = HUB if known is None else known
    if name not in known:
        raise InputError(
            f"no text {name!r} is known on the hub.",
            hint=f"use hub:{', hub:'.join(known)}, or download it and give the folder.",
        )
    source = known[name]
    parts = _download(source)
    texts = {}
    for split, theirs in zip(SPLITS, ("train", "validation", "test"), strict=True):
        lines = [line.strip("\n") for line in parts[theirs]["text"]]
        found = text_digest(lines)
        if found != source.digests[split]:
            raise InputError(
                f"the {split} text of {source.path} is not the expected one: its SHA-256 is "
                f"{found}, not {source.digests[split]}.",
                hint="it was changed or damaged on its way; remove it from the cache of "
                "`datasets` and try again, or give a folder.",
            )
        texts[split] = "\n".join(lines) + "\n"
    return texts


def _download(source: HubText) -> Any:
    with needing("datasets", extra="hub"):
        import datasets  # type: ignore[import-untyped]
    try:
        return datasets.load_dataset(source.path, source.config)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise LocaterError(
            f"{source.path} could not be loaded from the hub: {error}",
            hint="check the network or HF_ENDPOINT; without one, --data takes a folder with "
            "train.txt, valid.txt and test.txt.",
        ) from error


_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled"}
_TOKEN = re.compile(r"<\w+>|\w+(?:['’]\w+)*|[^\w\s]")
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be been but by can could do does each from has have how into it its "
        "may must no of on only or other should so such than that the their them then there these "
        "they this those to used was we were what when where which will with without would you",
    )
)
_UNDERLINE = re.compile(r"^\s*([=*^~+#\"-])\1{2,}\s*$")
_MARKUP = re.compile(r":\w+:(?=`)|[*`]{1,2}(?=\S)|(?<=\S)[*`]{1,2}|^\s*[-*+•]\s+")


def tokenize(text: str) -> list[str]:
    """Words with their apostrophes, every other sign for itself, and names in angle brackets.

    >>> tokenize("Don't <unk> (it's 3.14).")
    ["Don't", '<unk>', '(', "it's", '3', '.', '14', ')', '.']
    """
    return _TOKEN.findall(text)


def is_prose(paragraph: str) -> bool:
    """Tell a sentence from code, a table or a signature: one word in seven is a function word.

    >>> is_prose("Return the number of items that the container has.")
    True
    >>> is_prose("for key, value in table.items(): result[key] = value + 1")
    False
    """
    if ">>>" in paragraph or "::=" in paragraph or "|  " in paragraph:
        return False
    words = re.findall(r"[A-Za-z]+", paragraph)
    signs = sum(not (one.isalnum() or one.isspace()) for one in paragraph)
    common = sum(word.lower() in _FUNCTION_WORDS for word in words)
    return len(words) >= 6 and 7 * common >= len(words) and 8 * signs <= len(paragraph)


def paragraphs(text: str) -> Iterator[str]:
    """The prose of a documentation text, one unwrapped paragraph after the other."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = [line for line in block.splitlines() if not _UNDERLINE.match(line)]
        if any(line.lstrip().startswith((">>>", "...")) for line in lines):
            continue
        paragraph = " ".join(_MARKUP.sub("", line).strip() for line in lines)
        if is_prose(paragraph):
            yield paragraph


def documents() -> Iterator[tuple[str, str]]:
    """Every reference topic and every library module's docstrings, by name; nothing is imported
    but the topics, the rest is parsed."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic {name}", topics[name]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _sources(root):
        docstrings = "\n\n".join(_docstrings(path))
        if docstrings:
            yield f"module {path.relative_to(root).as_posix()}", docstrings


def embedded_text(cache: Path) -> dict[str, str]:
    """Train, valid and test text of the running Python, one paragraph a line, in tokens.

    Documents are dealt out by the hash of their names, nine tenths to train; a paragraph that
    stands in several counts once.  It is read in some seconds, then kept in the cache.
    """
    stored = {split: cache / f"python-{_fingerprint()}.{split}.txt" for split in SPLITS}
    if all(path.is_file() for path in stored.values()):
        return {split: path.read_text(encoding="utf-8") for split, path in stored.items()}
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for name, text in sorted(documents(), key=lambda one: _hash(one[0])):
        share = int(_hash(name)[:8], 16) / 16**8
        split = "train" if share < 0.9 else "valid" if share < 0.95 else "test"
        for paragraph in paragraphs(text):
            line = " ".join(tokenize(paragraph))
            if line not in seen:
                seen.add(line)
                lines[split].append(line)
    if not all(lines.values()):
        raise InputError(
            f"Python {sys.version.split()[0]} carries no documentation here.",
            hint="its library may be stripped or zipped; give a text file or folder instead.",
        )
    texts = {split: "\n".join(lines[split]) + "\n" for split in SPLITS}
    for split, text in texts.items():
        write_file(stored[split], text)
    return texts


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sources(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _fingerprint() -> str:
    """Which library was read: the version alone does not tell a stripped one from a whole one."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sizes = [f"{path.relative_to(root)} {path.stat().st_size}" for path in _sources(root)]
    version = sys.version.split()[0]
    return f"{version}-{_hash(chr(10).join([str(_PROSE_VERSION), version, *sizes]))[:12]}"


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # templates and examples of errors
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
