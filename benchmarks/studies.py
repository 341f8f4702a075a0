"""What the studies of real models share: their flags, their stored results, their pages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from locater.models.loading import read_text, text_blocks
from locater.report.tables import update_page

RESULTS = Path(__file__).parents[1] / "results"
MODELS = ("minilm", "smollm2", "rxnfp", "rxnfp-tuned", "antiberty", "rxnmapper", "demo")
"""In the order of the pages."""
Studies = dict[str, Any]


def study_parser(
    words: str | None, folder: str, *, tokens: int = 64, blocks: int
) -> argparse.ArgumentParser:
    """The flags that every study has; its results stand in this folder of `results`."""
    parser = argparse.ArgumentParser(
        description=words, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("text", nargs="?")
    parser.add_argument("--name")
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--blocks", type=int, default=blocks)
    parser.add_argument("--special", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / folder)
    parser.add_argument("--page", type=Path, help="write this page's tables, and do nothing else")
    return parser


def load(folder: Path) -> Studies:
    """The studies that are there, by name."""
    return {
        name: json.loads(path.read_text())
        for name in MODELS
        if (path := folder / f"{name}.json").exists()
    }


def has_page(
    given: argparse.Namespace,
    table: Callable[[Studies, str], str],
    load: Callable[[Path], Studies] = load,
) -> bool:
    """Whether a page was asked for, which then has its tables."""
    if given.page:
        studies = load(given.out)
        print("wrote", update_page(given.page, lambda name: table(studies, name)))
    return bool(given.page)


def stored(given: argparse.Namespace, parts: str) -> tuple[Path, dict[str, Any]]:
    """Where a study is kept, and what it holds so far; what is under `parts` is not done again."""
    path = given.out / f"{given.name}.json"
    if path.exists():
        return path, json.loads(path.read_text())
    return path, {"model": given.name, "tokens": given.tokens, parts: {}}


def asked_blocks(given: argparse.Namespace, tokenizer: Any) -> Any:
    """The text in blocks, as the flags say."""
    sizes = {"tokens": given.tokens, "blocks": given.blocks, "special": given.special}
    return text_blocks(tokenizer, read_text(given.text), **sizes)
