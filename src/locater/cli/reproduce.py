"""`locater reproduce`: every figure of the paper again, on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from locater.cli.terminal import parse, print_json, say


def run(arguments: Sequence[str]) -> None:
    """Make the page and print where it is."""
    from locater.paper.reproduce import ReproduceConfig, reproduce

    @dataclass(frozen=True, kw_only=True)
    class Reproduce(ReproduceConfig):
        __doc__ = ReproduceConfig.__doc__
        json: bool = False
        """Print where the page is as JSON."""

    config = parse(Reproduce, "reproduce", arguments)
    page = reproduce(config, report=say).resolve()
    if config.json:
        print_json({"page": str(page), "parts": config.parts})
    else:
        print(page)
