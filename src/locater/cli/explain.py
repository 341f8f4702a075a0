"""`locater explain`: whether the theory predicts what a model's attention does on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from locater.cli.probe import OnText
from locater.cli.terminal import parse, plain, print_json, progress, say, show
from locater.reality.against_theory import Reality, RealityConfig, against_theory


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(RealityConfig, OnText):
    """Predict a model's attention from weights and token moments, and measure it on other text.

    Moments come from the first part of the text, attention is measured on the rest; the table
    begins with the worst predicted heads.
    """

    exact: bool = False
    """Also invert the exact law of the score: slower, and seldom another answer."""


def run(arguments: Sequence[str]) -> None:
    """Predict and measure, then print a table, JSON or where the page is."""
    command = parse(ExplainCommand, "explain", arguments, first="model")
    command.check()
    model, blocks = command.load()
    with progress("blocks, then layers") as report:
        reality = against_theory(
            model, blocks, command, report=lambda stage, done, total: report(done, total)
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
    else:
        _print(reality, command.top)


def _print(reality: Reality, top: int) -> None:
    from locater.reality.predictions import COLUMNS
    from locater.report.tables import Columns, terminal_table

    summary, best = reality.summary(), reality.layers[0].best
    rows = sorted(reality.rows(), key=lambda row: -row["rho_error_full"])
    columns: Columns = {
        "head": lambda row: f"layer {row['layer']} head {row['head']}",
        "entropy": "entropy:.2f",
        "pre-\ndicted": "entropy_full:.2f",
        "error in\nρ: paper": "rho_error_printed:.3f",
        COLUMNS[best].replace(" ", "\n", 1): f"rho_error_{best}:.3f",
        "full\nmoments": "rho_error_full:.3f",
        "copied": "rho_error_copy:.3f",
        "why": lambda row: ", ".join(row["why"]["main"]),
    }
    show(terminal_table(rows[: top or None], columns, left=["head", "why"], is_compact=True))
    print(
        f"{summary['heads']} heads; moments of {reality.estimated_on} blocks of {reality.tokens} "
        f"tokens, measured on {reality.measured_on} others.\n"
        f"mean error of ρ: {_errors(summary, 'rho', ('printed', best, 'full', 'copy'))} "
        f"(noise of counting {summary['rho_noise']:.3f}).\n"
        f"mean error of the entropy: {_errors(summary, 'entropy', (best, 'full', 'copy'))} nats.\n"
        "Copying needs the text and the weights that are asked about; the theory also answers for "
        "others."
    )


def _errors(summary: dict[str, Any], what: str, names: Sequence[str]) -> str:
    from locater.reality.predictions import COLUMNS

    return ", ".join(f"{COLUMNS[name]} {summary[f'{what}_error_{name}']:.3f}" for name in names)
