"""`locater explain`: whether the theory predicts what a model's attention does on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    from locater.report.tables import Columns, terminal_table

    summary, best = reality.summary(), reality.layers[0].best
    rows = sorted(reality.rows(), key=lambda row: -row["rho_error_full"])
    columns: Columns = {
        "layer": "layer",
        "head": "head",
        "entropy": "entropy:.3f",
        "predicted": "entropy_full:.3f",
        "first": "sink_mass:.3f",
        "own": "own_mass:.3f",
        "ρ off: paper": "rho_error_printed:.3f",
        best: f"rho_error_{best}:.3f",
        "full": "rho_error_full:.3f",
        "copy": "rho_error_copy:.3f",
        "why": lambda row: ", ".join(row["why"]["main"]),
    }
    show(terminal_table(rows[: top or None], columns, left=["why"]))
    print(
        f"{summary['heads']} heads; moments of {reality.estimated_on} blocks of {reality.tokens} "
        f"tokens, measured on {reality.measured_on} others.\n"
        f"mean |ρ predicted − measured|: printed {summary['rho_error_printed']:.3f}, "
        f"{best} {summary[f'rho_error_{best}']:.3f}, full moments {summary['rho_error_full']:.3f}, "
        f"copied from the first part {summary['rho_error_copy']:.3f} "
        f"(counting noise {summary['rho_noise']:.3f}).\n"
        f"mean |entropy predicted − measured|: {best} {summary[f'entropy_error_{best}']:.3f}, "
        f"full moments {summary['entropy_error_full']:.3f}, "
        f"copied {summary['entropy_error_copy']:.3f} nats.\n"
        "Copying needs the text and the weights that are asked about; the theory also answers for "
        "others."
    )
