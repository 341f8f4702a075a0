"""`locater probe`: what a model's attention does on a text, and whether the theory predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locater.cli.terminal import check_figure, console, parse, plain, print_json, progress, say
from locater.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ProbeCommand:
    """Measure a model's attention on a text and predict it from weights and token moments."""

    model: str
    """May stand first, without --model: a folder, a GGUF file or a hub id (extra `hf`)."""
    text: Path
    """A plain text; moments come from its first part, attention is measured on the rest."""
    tokens: int = 64
    """T, the length of a block; its last token is the query."""
    blocks: int = 600
    """Blocks in all, evenly spread over the text."""
    estimate: float = 0.5
    """Share of the blocks that the moments are estimated on."""
    layers: str | None = None
    """Only attentions whose name this regular expression finds."""
    special: bool = False
    """Put the model's opening token ([CLS], or its beginning of a text) before every block."""
    exact: bool = False
    """Also invert the exact law of the score: slower, and seldom another answer."""
    top: int = 20
    """Rows of the table, the worst predicted heads first; 0 shows all."""
    seed: int = 0
    out: Path | None = None
    """Write a page (.html) or a figure (.svg, .png, .pdf, .json) here."""
    json: bool = False
    """Print heads, layers and summary as JSON."""


def run(arguments: Sequence[str]) -> None:
    """Measure and predict, then print a table, JSON or where the page is."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    command = parse(ProbeCommand, "probe", arguments)
    check_figure(command.out)
    if command.top < 0:
        raise ConfigError(f"top must be zero or more, got {command.top}.", hint="0 shows all.")
    from locater.models.loading import load_model, read_text, text_blocks
    from locater.reality.against_theory import RealityConfig, against_theory

    text = read_text(command.text)
    config = RealityConfig(
        estimate=command.estimate, layers=command.layers, exact=command.exact, seed=command.seed
    )
    model, tokenizer = load_model(command.model)
    blocks = text_blocks(
        tokenizer,
        text,
        tokens=command.tokens,
        blocks=command.blocks,
        special=command.special,
    )
    with progress("blocks, then layers") as report:
        reality = against_theory(
            model, blocks, config, report=lambda stage, done, total: report(done, total)
        )
    for name, reason in reality.skipped.items():
        say(plain(f"skipped {name}: {reason}."))
    for warning in reality.warnings():
        say(plain(f"note: {warning}"))
    if command.out is not None:
        from locater.report.reality_view import save_reality

        say(f"wrote {save_reality(reality, command.out, title=command.model)}")
    if command.json:
        print_json(
            {
                "summary": reality.summary(),
                "layers": reality.layer_rows(),
                "heads": reality.rows(),
                "skipped": reality.skipped,
            }
        )
    elif command.out is None:
        _print(reality, command.top)


def _print(reality: Any, top: int) -> None:
    from rich.table import Table

    summary, best = reality.summary(), reality.layers[0].best
    rows = sorted(reality.rows(), key=lambda row: -row["rho_error_full"])
    table = Table(
        "layer", "head", "entropy", "predicted", "first", "own", "ρ off: paper", best, "full", "why"
    )
    for column in table.columns[:-1]:
        column.justify = "right"
    for row in rows[: top or None]:
        table.add_row(
            str(row["layer"]),
            str(row["head"]),
            f"{row['entropy']:.3f}",
            f"{row['entropy_full']:.3f}",
            f"{row['sink_mass']:.3f}",
            f"{row['own_mass']:.3f}",
            f"{row['rho_error_printed']:.3f}",
            f"{row[f'rho_error_{best}']:.3f}",
            f"{row['rho_error_full']:.3f}",
            ", ".join(row["why"]["main"]),
        )
    console().print(table)
    print(
        f"{summary['heads']} heads; moments of {reality.estimated_on} blocks of {reality.tokens} "
        f"tokens, measured on {reality.measured_on} others.\n"
        f"mean |ρ predicted − measured|: printed {summary['rho_error_printed']:.3f}, "
        f"{best} {summary[f'rho_error_{best}']:.3f}, full moments {summary['rho_error_full']:.3f} "
        f"(counting noise {summary['rho_noise']:.3f}).\n"
        f"mean |entropy predicted − measured|: {best} {summary[f'entropy_error_{best}']:.3f}, "
        f"full moments {summary['entropy_error_full']:.3f} nats."
    )
