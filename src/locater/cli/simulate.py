"""`locater simulate`: Fig. 5, here or on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from locater.cli.terminal import check_figure, console, parse, print_json, progress, say
from locater.errors import ConfigError


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


def run(arguments: Sequence[str]) -> None:
    """Simulate, then print a table, JSON or where the figure is."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--preset", *arguments]
    command = parse(SimulateCommand, "simulate", arguments)
    check_figure(command.out)
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
        with progress(name) as report:
            simulations[name] = simulate(
                replace(config, **changes),
                store=command.store,
                engine=command.engine,
                workers=command.workers,
                ray_address=command.ray_address,
                report=report,
            )
    if command.out is not None:
        from locater.paper.fig5 import fig5_chart
        from locater.report.charts import save_chart

        chart = fig5_chart(simulations, title="Simulated signal propagation (Fig. 5)")
        say(f"wrote {save_chart(chart, command.out)}")
    if command.json:
        print_json(
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
    console().print(table)
