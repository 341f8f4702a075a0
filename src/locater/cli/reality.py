"""What theories say of a model's heads on a text: `locater explain`, `theories`, `what-if`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locater.cli.audit import say_limits
from locater.cli.probe import OnText
from locater.cli.terminal import check_figure, parse, plain, print_json, progress, say, show, values
from locater.errors import ConfigError
from locater.files import DEMO, packaged
from locater.reality.against_theory import Reality, RealityConfig, against_theory
from locater.reality.predictions import COLUMNS
from locater.reality.theories import MEASURED, League, theories
from locater.reality.what_if import Change, Moments, WhatIf, moments, what_if
from locater.report.tables import Columns, terminal_table


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(RealityConfig, OnText):
    """Predict a model's attention from weights and token moments, and measure it on other text.

    Moments come from the first part of the text, attention is measured on the rest; the table
    begins with the worst predicted heads.
    """

    exact: bool = False
    """Also invert the exact law of the score: slower, and seldom another answer."""


def do_explain(arguments: Sequence[str]) -> None:
    """Predict and measure, then print a table, JSON or where the page is."""
    command = parse(ExplainCommand, "explain", arguments, first="model")
    check_figure(command.out)
    model, blocks = command.load()
    with progress("blocks, then layers") as report:
        reality = against_theory(
            model, blocks, command, report=lambda stage, done, total: report(done, total)
        )
    _say_skipped(reality.skipped)
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
        _show_reality(reality, command.top)


def _say_skipped(skipped: dict[str, str]) -> None:
    for name, reason in skipped.items():
        say(plain(f"skipped {name}: {reason}."))


def _show_reality(reality: Reality, top: int) -> None:
    summary, best = reality.summary(), reality.layers[0].best

    def errors(what: str, *names: str) -> str:
        return ", ".join(f"{COLUMNS[name]} {summary[f'{what}_error_{name}']:.3f}" for name in names)

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
        f"mean error of ρ: {errors('rho', 'printed', best, 'full', 'copy')} "
        f"(noise of counting {summary['rho_noise']:.3f}).\n"
        f"mean error of the entropy: {errors('entropy', best, 'full', 'copy')} nats.\n"
        "Copying needs the text and the weights that are asked about; the theory also answers for "
        "others."
    )


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


def do_theories(arguments: Sequence[str]) -> None:
    """Compute and measure, then print a table, JSON or where the page is."""
    command = parse(TheoriesCommand, "theories", arguments, first="model")
    check_figure(command.out)
    config = RealityConfig(
        draws=command.draws, layers=command.layers, batch=command.batch, seed=command.seed
    )
    model, blocks = command.load()
    with progress("blocks, then layers") as report:
        league = theories(
            model, blocks, config, squares=command.squares,
            report=lambda stage, done, total: report(done, total),
        )  # fmt: skip
    _say_skipped(league.skipped)
    if command.out is not None:
        from locater.report.reality_view import save_league

        say(f"wrote {save_league(league.to_dict(), command.out, title=command.model)}")
    if command.json:
        print_json(league.to_dict())
    else:
        _show_league(league)


def _show_league(league: League) -> None:
    from locater.report.reality_view import LEAGUE

    rows = sorted(league.rows(), key=lambda row: -(row["orders"] or 0))
    shown = {name: LEAGUE[name] for name in ("theory", "knows", "about", "error", "orders")}
    show(terminal_table(rows, shown, left=["theory", "knows", "about"]))
    print(
        f"{len(league.heads)} heads, {league.tokens} tokens, measured on {league.blocks} blocks. "
        "error: mean |value − measured|, where a theory names a number or a bound; orders: rank "
        "correlation of heads, 1 is the right order."
    )
    print("; ".join(f"{name}: {words}" for name, words in MEASURED.items()) + ".")


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


def do_what_if(arguments: Sequence[str]) -> None:
    """Take or load the moments, predict, print."""
    command = parse(WhatIfCommand, "what-if", arguments, first="model")
    change = Change(**values(Change, command))
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
        _show_changes(found, known, command.top)
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


def _show_changes(found: WhatIf, known: Moments, top: int) -> None:
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
        f"{means['entropy_after']:.2f} nats. Largest logit: above its row's mean, the 99.9 % "
        "quantile of the rows drawn. Change: of entropy, ± within what nine of ten real heads were."
    )
