"""`locater what-if`: what heads would do at another length, rotation or scale, or with a LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from locater.cli.audit import say_limits
from locater.cli.probe import OnText
from locater.cli.terminal import check_figure, parse, plain, print_json, progress, say, show
from locater.errors import ConfigError
from locater.files import DEMO, packaged
from locater.reality.what_if import Change, Moments, WhatIf, moments, what_if


@dataclass(frozen=True, kw_only=True)
class WhatIfCommand(Change):
    """Predict what every head would do after a change that was never run.

    MODEL is a model, with a --text for the moments of its tokens, or a file of `locater moments`.
    """

    model: str
    """May stand first, without --model: a model, or moments.safetensors."""
    text: Path | None = None
    """A plain text; not needed with a file of moments."""
    from_tokens: int = 64
    """The length of the blocks that the moments are taken from."""
    blocks: int = 600
    """Blocks in all, evenly spread over the text."""
    draws: int = 400
    """Rows of logits drawn for every head."""
    seed: int = 0
    """Of the drawn rows of logits."""
    top: int = 20
    """Rows of the table, the largest change of entropy first; 0 shows all."""
    out: Path | None = None
    """Write a page (.html) or a figure (.svg, .png, .pdf, .json) here."""
    json: bool = False
    """Print everything as JSON."""


def run(arguments: Sequence[str]) -> None:
    """Take or load the moments, predict, print."""
    command = parse(WhatIfCommand, "what-if", arguments, first="model")
    change = Change(**{field.name: getattr(command, field.name) for field in fields(Change)})
    check_figure(command.out)
    known = _known(command)
    with progress("heads") as report:
        found = what_if(known, change, draws=command.draws, seed=command.seed, report=report)
    if command.out is not None:
        from locater.report.reality_view import save_what_if

        say(f"wrote {save_what_if(found.to_dict(), command.out, known=known.blocks)}")
    if command.json:
        print_json(found.to_dict())
    else:
        _print(found, known, command.top)
    say_limits(found.caveats, ())


def _known(command: WhatIfCommand) -> Moments:
    if Path(command.model).is_file() and command.text is None:
        return Moments.load(Path(command.model))
    if command.text is None and packaged(command.model) != DEMO:
        raise ConfigError(
            "without a text nothing is known of the model's tokens.",
            hint="give --text FILE, or a file of `locater moments` in the model's place.",
        )
    source = OnText(
        model=command.model, text=command.text, tokens=command.from_tokens, blocks=command.blocks
    )
    model, blocks = source.load()
    with progress("layers") as report:
        return moments(model, blocks, name=command.model, adapter=command.adapter, report=report)


def _print(found: WhatIf, known: Moments, top: int) -> None:
    from locater.report.tables import Columns, terminal_table

    def pair(name: str, form: str) -> Any:
        return lambda row: f"{row[f'{name}_before']:{form}} → {row[f'{name}_after']:{form}}"

    rows = sorted(found.rows, key=lambda row: -abs(row["entropy_after"] - row["entropy_before"]))
    columns: Columns = {
        "layer": "layer",
        "head": "head",
        "entropy": pair("entropy", ".2f"),
        "change": lambda row: f"{row['entropy_change']:+.2f} ± {row['entropy_change_bar']:.2f}",
        "on the first token": pair("sink_mass", ".2f"),
        "on itself": pair("own_mass", ".2f"),
        "distance": pair("distance", ".0f"),
        "largest logit": pair("largest", ".1f"),
    }
    print(
        f"{known.layers[0].tokens} → {found.tokens} tokens. Predicted from moments of "
        f"{known.blocks} blocks, for Gaussian queries and keys; nothing was run."
    )
    show(terminal_table(rows[: top or None], columns, title=plain(found.model)))
    means = found.summary
    print(
        f"{len(rows)} heads; mean entropy {means['entropy_before']:.2f} → "
        f"{means['entropy_after']:.2f} nats. Largest logit: in one row of a thousand, above the "
        "row's mean. Change: of entropy, ± within what nine of ten real heads were."
    )
