"""`locater theories`: everybody's formulas for a head, against what the heads do on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from locater.cli.probe import OnText
from locater.cli.terminal import parse, plain, print_json, progress, say, show
from locater.reality.against_theory import RealityConfig
from locater.reality.theories import MEASURED, League, theories


@dataclass(frozen=True, kw_only=True)
class TheoriesCommand(OnText):
    """Compute everybody's quantities of every head and hold them against attention on other text.

    Quantities come from the first half of the text, attention is measured on the second.
    """

    draws: int = 400
    """Rows of logits drawn for each of our own predictions of entropy."""
    squares: int = 24
    """Blocks of either half of which whole attention matrices are taken."""
    layers: str | None = None
    """Only attentions whose name this regular expression finds."""
    batch: int = 16
    """Blocks in one forward pass."""
    seed: int = 0
    """Of the drawn rows."""


def run(arguments: Sequence[str]) -> None:
    """Compute and measure, then print a table, JSON or where the page is."""
    command = parse(TheoriesCommand, "theories", arguments, first="model")
    command.check()
    config = RealityConfig(
        draws=command.draws, layers=command.layers, batch=command.batch, seed=command.seed
    )
    model, blocks = command.load()
    with progress("blocks, then layers") as report:
        league = theories(
            model, blocks, config, squares=command.squares,
            report=lambda stage, done, total: report(done, total),
        )  # fmt: skip
    for name, reason in league.skipped.items():
        say(plain(f"skipped {name}: {reason}."))
    if command.out is not None:
        from locater.report.reality_view import save_league

        say(f"wrote {save_league(league.to_dict(), command.out, title=command.model)}")
    if command.json:
        print_json(league.to_dict())
    else:
        _print(league)


def _print(league: League) -> None:
    from locater.report.reality_view import LEAGUE
    from locater.report.tables import terminal_table

    rows = sorted(league.rows(), key=lambda row: -(row["orders"] or 0))
    shown = {name: LEAGUE[name] for name in ("theory", "knows", "about", "error", "orders")}
    show(terminal_table(rows, shown, left=["theory", "knows", "about"]))
    print(
        f"{len(league.heads)} heads, {league.tokens} tokens, measured on {league.blocks} blocks. "
        "error: mean |value − measured|, where a theory names a number or a bound; orders: rank "
        "correlation of heads, 1 is the right order."
    )
    print("; ".join(f"{name}: {words}" for name, words in MEASURED.items()) + ".")
