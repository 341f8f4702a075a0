"""English prose that every Python carries: its reference topics and its library's docstrings."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from locater.errors import InputError
from locater.files import write_file

SPLITS = ("train", "valid", "test")
_RECIPE = 1  # counts changes to the cleaning, so that stored texts of another recipe are not read
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
    return f"{version}-{_hash(chr(10).join([str(_RECIPE), version, *sizes]))[:12]}"


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
