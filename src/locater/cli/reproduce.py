"""`locater reproduce`: every figure of the paper again, on one page; it needs what trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from locater.cli.terminal import parse, print_json, say
from locater.paper.parts import published
from locater.paper.reproduce import ReproduceConfig, reproduce


@dataclass(frozen=True, kw_only=True)
class ReproduceCommand(ReproduceConfig):
    """Reproduce the paper: every figure, what is right and what is wrong, one page.

    Published runs and studies come with the package; --results and --reality name others.
    """

    quick: bool = False
    """The same as --scale quick."""
    json: bool = False
    """Print where the page is as JSON."""


def do_reproduce(arguments: Sequence[str]) -> None:
    """Make the page and print where it is."""
    command = parse(ReproduceCommand, "reproduce", arguments)
    command = replace(
        command,
        scale="quick" if command.quick else command.scale,
        results=command.results or published("results/lab"),
        reality=command.reality or published("results/reality"),
    )
    page = reproduce(command, report=say).resolve()
    if command.json:
        print_json({"page": str(page), "parts": command.parts})
    else:
        print(page)
