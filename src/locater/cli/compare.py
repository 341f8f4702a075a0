"""`locater compare`: what changed between two checkpoints, head by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tyro.conf import Positional

from locater.cli.audit import TokenFlags, head_name, say_limits
from locater.cli.terminal import console, parse, plain, print_json, progress

if TYPE_CHECKING:
    from locater.audit.compare import Comparison


@dataclass(frozen=True, kw_only=True)
class CompareCommand(TokenFlags):
    """What changed from one checkpoint to another, head by head, most changed first."""

    before: Positional[str]
    """A folder, file, URL or hub id."""
    after: Positional[str]
    """The same model later: fine-tuned, further trained, with an adapter."""
    top: int = 20
    """How many heads to list; 0 lists all."""
    json: bool = False
    """Print everything as JSON."""


def run(arguments: Sequence[str]) -> None:
    """Compare, then print a table or JSON."""
    command = parse(CompareCommand, "compare", arguments)
    from locater.audit.compare import compare_checkpoints

    with progress("compare") as report:
        comparison = compare_checkpoints(
            command.before, command.after, report=report, **command.settings()
        )
    if command.json:
        print_json(comparison.to_dict())
    else:
        _show(comparison, command.top)


def _show(comparison: Comparison, top: int) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("head", "‖ΔW‖/‖W‖", "Δr", "Δmean", "Δvar", "Δentropy", "verdict",
                  pad_edge=False)  # fmt: skip
    for column in table.columns[1:-1]:
        column.justify = "right"
    for row in comparison.rows[: top or None]:
        changes = (row.changes[name] for name in ("r", "mean", "variance", "entropy"))
        table.add_row(
            head_name(row.part, row.kind, row.layer, row.head),
            f"{row.distance:.3g}",
            *("-" if value is None else f"{value:+.3g}" for value in changes),
            " → ".join(dict.fromkeys((row.verdict_before, row.verdict_after))),
        )
    out = console()
    out.print(table)
    if top and len(comparison.rows) > top:
        out.print(f"… and {len(comparison.rows) - top} more heads: --top 0 or --json has them.")
    out.print(Text(plain(comparison.summary)))
    say_limits(comparison.to_dict()["caveats"], comparison.skipped)
