"""`locater compare`: what changed between two checkpoints, head by head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tyro.conf import Positional

from locater.audit.compare import HeadChange, compare_checkpoints
from locater.cli.audit import CheckpointFlags, named, say_limits
from locater.cli.terminal import parse, plain, print_json, progress, say, show
from locater.report.tables import Columns, terminal_table


@dataclass(frozen=True, kw_only=True, eq=False)
class CompareCommand(CheckpointFlags):
    """What changed from one checkpoint to another, head by head, most changed first."""

    before: Positional[str]
    """A folder, file, URL or hub id."""
    after: Positional[str]
    """The same model later: fine-tuned, further trained, with an adapter."""
    top: int = 20
    """How many heads to list; 0 lists all."""
    json: bool = False
    """Print everything as JSON."""


def _change(name: str) -> Callable[[HeadChange], str]:
    return lambda row: "-" if row.changes[name] is None else f"{row.changes[name]:+.3g}"


_HEADS: Columns = {
    "head": named,
    "‖ΔW‖/‖W‖": "distance:.3g",
    "Δr": _change("r"),
    "Δmean": _change("mean"),
    "Δvar": _change("variance"),
    "Δentropy": _change("entropy"),
    "looks": lambda row: " → ".join(dict.fromkeys((row.regime_before, row.regime_after))),
}


def run(arguments: Sequence[str]) -> None:
    """Compare, then print a table or JSON."""
    command = parse(CompareCommand, "compare", arguments)
    with progress("compare") as report:
        comparison = compare_checkpoints(
            command.before,
            command.after,
            report=report,
            say=say,
            **command.source(),
            **command.settings(),
        )
    if command.json:
        print_json(comparison.to_dict())
        return
    for sentence in dict.fromkeys((*comparison.before.head, *comparison.after.head)):
        show(plain(sentence))
    shown = comparison.rows[: command.top or None]
    table = terminal_table(shown, _HEADS, left=("head", "looks"))
    table.pad_edge = False
    show(table)
    if len(shown) < len(comparison.rows):
        more = len(comparison.rows) - len(shown)
        show(f"… and {more} more heads: --top 0 or --json has them.")
    show(plain(comparison.summary))
    say_limits(comparison.to_dict()["caveats"], comparison.skipped)
