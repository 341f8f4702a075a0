"""The command line: parse, call one library function, print."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from locater.errors import ConfigError, LocaterError

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class TheoryConfig:
    """Where attention looks for one eigenspectrum: ρ(θ) as printed, corrected, and exact."""

    xi: float
    """ξ = tr(W)/√tr(W²): how far the spectrum concentrates off zero."""
    eta: float
    """η = √tr(W²)/λ: its scale."""
    tokens: int = 64
    """T, the length of the sequence."""
    dim: int = 128
    """d, the number of eigenvalues."""
    process: Literal["random-walk", "autoregressive", "independent"] = "random-walk"
    """How the tokens follow each other, in the exact curve."""
    phi: float = 0.9
    """Correlation of neighbors of the autoregressive process."""
    out: Path | None = None
    """Draw the figure here: .html, .svg, .png, .pdf or .json."""
    json: bool = False
    """Print the curves as JSON."""


def _theory(arguments: Sequence[str]) -> None:
    config = _parse(TheoryConfig, "theory", arguments)
    from locater.core.process import TokenProcess
    from locater.core.spectrum import QKForm
    from locater.core.theory import classify
    from locater.engines import one_thread
    from locater.report.curves import rho_curves

    makers: dict[str, Callable[[], TokenProcess]] = {
        "random-walk": lambda: TokenProcess.random_walk(config.tokens),
        "autoregressive": lambda: TokenProcess.autoregressive(config.tokens, config.phi),
        "independent": lambda: TokenProcess.independent(config.tokens),
    }
    process = makers[config.process]()
    form = QKForm.from_xi_eta(config.xi, config.eta, dim=config.dim)
    with one_thread():
        regime = classify(form, process)
    setting: dict[str, Any] = {"tokens": config.tokens, "dim": config.dim, "process": process}
    summary = {
        "xi": config.xi,
        "eta": config.eta,
        "r": regime.r.item(),
        "regime": regime.name,
        "tokens_on": regime.count.item(),
        "first_on": regime.first.item(),
        "last_on": regime.last.item(),
    }
    if config.out is not None:
        from locater.report.figures import rho_chart, save_chart

        title = f"ξ = {config.xi:g}, η = {config.eta:g}: {regime.name}"
        chart = rho_chart(rho_curves(config.xi, config.eta, **setting), title=title)
        _say(f"wrote {save_chart(chart, config.out)}")
    records = rho_curves(config.xi, config.eta, **setting, points=None)
    if config.json:
        _print_json({**summary, "process": config.process, "curves": records})
    elif config.out is None:
        _print_rho_table(records, config.tokens)
        print(
            f"regime: {regime.name}, r = {regime.r.item():.4g}; {regime.count.item()} of "
            f"{config.tokens} tokens on ({regime.first.item()} to {regime.last.item()})"
        )


def _print_rho_table(records: Sequence[dict[str, Any]], tokens: int) -> None:
    from rich.table import Table

    curves: dict[str, list[float]] = {}
    for record in records:
        curves.setdefault(record["curve"], []).append(record["rho"])
    table = Table("θ", *curves)
    for column in table.columns:
        column.justify = "right"
    for position in sorted({round((tokens - 1) * k / 10) for k in range(11)}):
        row = (f"{rho[position]:.4f}" for rho in curves.values())
        table.add_row(f"{(position + 1) / tokens:.3f}", *row)
    _console().print(table)


@dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """Simulate ρ and the attention entropy for drawn W_QK, beside the exact theory (Fig. 5)."""

    preset: Literal["fig5", "fig5-precise"] = "fig5"
    """May stand first, without --preset: the paper's 300 sequences for every W_QK, or 100,000."""
    panels: str = ""
    """Only the panels whose name contains this; all by default."""
    sequences: int | None = None
    """Token sequences for every W_QK, in place of the preset's."""
    draws: int | None = None
    """W_QK for every pair of mean and scale."""
    tokens: int | None = None
    model: int | None = None
    means: tuple[float, ...] = ()
    """Means of the eigenvalues, combined with every one of --scales."""
    scales: tuple[float, ...] = ()
    phi: float | None = None
    """Correlation of neighbors of the autoregressive process."""
    temperature: float | None = None
    """λ; √model by default."""
    estimator: Literal["conditional", "count"] = "conditional"
    """`count` is the paper's; `conditional` integrates all but the last token out."""
    seed: int = 0
    memory: int = 16
    """Megabytes of tokens that one worker holds at a time."""
    engine: Literal["local", "ray"] = "local"
    """This machine's cores, or a Ray cluster (extra `cluster`)."""
    workers: int | None = None
    ray_address: str | None = None
    """A running cluster, HOST:6379; without it --engine ray starts one here."""
    store: Path = Path("out/simulate")
    """Finished units are kept here, so that an interrupted simulation goes on."""
    out: Path | None = None
    """Draw the figure here: .html, .svg, .png, .pdf or .json."""
    json: bool = False
    """Print the summary and all profiles as JSON."""


def _simulate(arguments: Sequence[str]) -> None:
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--preset", *arguments]
    command = _parse(SimulateCommand, "simulate", arguments)
    from dataclasses import replace

    from locater.simulation import preset, simulate

    names = ("sequences", "draws", "tokens", "model", "phi", "temperature", "estimator", "seed",
             "memory")  # fmt: skip
    changes = {name: value for name in names if (value := getattr(command, name)) is not None}
    panels = {k: v for k, v in preset(command.preset).items() if command.panels in k}
    if not panels:
        raise ConfigError(
            f"no panel's name contains {command.panels!r}.",
            hint="the panels: " + "; ".join(preset(command.preset)) + ".",
        )
    pairs = next(iter(panels.values())).pairs
    means = command.means or tuple(dict.fromkeys(mean for mean, _ in pairs))
    scales = command.scales or tuple(dict.fromkeys(scale for _, scale in pairs))
    changes["pairs"] = tuple((mean, scale) for mean in means for scale in scales)
    simulations = {}
    for name, config in panels.items():
        with _progress(name) as report:
            simulations[name] = simulate(
                replace(config, **changes),
                store=command.store,
                engine=command.engine,
                workers=command.workers,
                ray_address=command.ray_address,
                report=report,
            )
    if command.out is not None:
        from locater.report.fig5 import fig5_chart
        from locater.report.figures import save_chart

        chart = fig5_chart(simulations, title="Simulated signal propagation (Fig. 5)")
        _say(f"wrote {save_chart(chart, command.out)}")
    if command.json:
        _print_json(
            {
                name: {
                    "summary": simulation.summary(),
                    "units": [unit.to_dict() for unit in simulation.units],
                }
                for name, simulation in simulations.items()
            }
        )
    elif command.out is None:
        for name, simulation in simulations.items():
            _print_simulation(name, simulation.summary())


def _print_simulation(name: str, rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("mean", "scale", "ξ", "η", "peak ρ", "tokens on", "entropy", "|sim − exact|")
    table.title, table.title_justify = name, "left"
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(
            f"{row['mean']:g}",
            f"{row['scale']:g}",
            f"{row['xi']:.3f}",
            f"{row['eta']:.3f}",
            f"{row['peak']:.3f}",
            f"{row['first_on']}-{row['last_on']}",
            f"{row['entropy']:.3f} ± {row['entropy_error']:.3f}",
            f"{row['conditional_gap']:.4f}, counted {row['count_gap']:.4f}",
        )
    _console().print(table)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal; otherwise silence."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _reproduce(arguments: Sequence[str]) -> None:
    from locater.report.reproduce import ReproduceConfig, reproduce

    @dataclass(frozen=True, kw_only=True)
    class Reproduce(ReproduceConfig):
        __doc__ = ReproduceConfig.__doc__
        json: bool = False
        """Print where the page is as JSON."""

    config = _parse(Reproduce, "reproduce", arguments)
    page = reproduce(config, report=_say).resolve()
    if config.json:
        _print_json({"page": str(page), "parts": config.parts})
    else:
        print(page)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str, str]] = {
    "theory": (
        _theory,
        "ρ(θ) for one (ξ, η): as printed, corrected, exact at finite length",
        "locater theory --xi 5 --eta 0.1 --tokens 40 --dim 128 --out figure.html",
    ),
    "simulate": (
        _simulate,
        "simulate ρ and attention entropy for drawn W_QK (Fig. 5), here or on Ray",
        "locater simulate fig5 --panels 'Σ = I' --draws 2 --out fig5.html",
    ),
    "reproduce": (
        _reproduce,
        "make every figure of the paper again, on one page",
        "locater reproduce --only fig1,fig4 --out out",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 an error that we explain, 2 a misuse of the command line."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from locater import __version__

        print(__version__)
        return 0
    command = _COMMANDS.get(arguments[0])
    if command is None:
        _say(f"error: unknown command {arguments[0]!r}.\nhint: one of {', '.join(_COMMANDS)}.")
        return 2
    try:
        command[0](arguments[1:])
    except LocaterError as error:
        _say(f"error: {error}")
        return 1
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        _say("interrupted; run the same command again to go on.")
        return 130
    except SystemExit as stop:  # tyro's help (0) and usage errors (2)
        if not stop.code:
            print(f"example:\n  {command[2]}")
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
    return 0


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary, _) in _COMMANDS.items()]
    return (
        "usage: locater COMMAND [OPTIONS]\n\n"
        "Where does a transformer's attention look, is it collapsing, and how do I control it?\n\n"
        "commands:\n" + "\n".join(lines) + "\n\n"
        "`locater COMMAND --help` lists a command's options and an example; --json prints data.\n\n"
        f"example:\n  {_COMMANDS['theory'][2]}"
    )


def _parse(config: type[Config], command: str, arguments: Sequence[str]) -> Config:
    import tyro

    return tyro.cli(config, prog=f"locater {command}", args=list(arguments))


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 100)


def _print_json(data: Any) -> None:
    print(json.dumps(_plain(data), ensure_ascii=False, indent=2, allow_nan=False))


def _plain(data: Any) -> Any:
    """What JSON can say: NaN and infinity, which it cannot, become null."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
