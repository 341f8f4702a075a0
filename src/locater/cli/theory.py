"""ρ of an eigenspectrum, and of drawn ones (Fig. 5): `locater theory`, `locater simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Suppress

from locater.cli.terminal import (
    EngineFlags,
    check_figure,
    flag,
    parse,
    print_json,
    progress,
    say,
    show,
    values,
    with_first,
)
from locater.core.form import QKForm
from locater.core.process import TokenProcess
from locater.core.theory import classify
from locater.engines import one_thread
from locater.errors import ConfigError
from locater.paper.curves import rho_curves
from locater.report.tables import Columns, terminal_table
from locater.simulation import SimulateConfig, preset, simulate


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


def do_theory(arguments: Sequence[str]) -> None:
    """Compute ρ, then print a table, JSON or where the figure is."""
    config = parse(TheoryConfig, "theory", arguments)
    process = TokenProcess.named(config.process, config.tokens, phi=config.phi)
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
        from locater.report.charts import rho_chart, save_chart

        title = f"ξ = {config.xi:g}, η = {config.eta:g}: {regime.name}"
        chart = rho_chart(rho_curves(config.xi, config.eta, **setting), title=title)
        say(f"wrote {save_chart(chart, config.out)}")
    records = rho_curves(config.xi, config.eta, **setting, points=None)
    if config.json:
        print_json({**summary, "process": config.process, "curves": records})
    else:
        show(_rho_table(records, config.tokens))
        print(
            f"regime: {regime.name}, r = {regime.r.item():.4g}; {regime.count.item()} of "
            f"{config.tokens} tokens on ({regime.first.item()} to {regime.last.item()})"
        )


def _rho_table(records: Sequence[dict[str, Any]], tokens: int) -> Any:
    """ρ of every curve at eleven positions."""
    curves: dict[str, list[float]] = {}
    for record in records:
        curves.setdefault(record["curve"], []).append(record["rho"])
    rows = [
        [f"{(position + 1) / tokens:.3f}", *(f"{rho[position]:.4f}" for rho in curves.values())]
        for position in sorted({round((tokens - 1) * k / 10) for k in range(11)})
    ]
    return terminal_table(rows, ["θ", *curves])


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(EngineFlags, SimulateConfig):
    """Simulate ρ and the attention entropy for drawn W_QK, beside the exact theory (Fig. 5)."""

    preset: Literal["fig5", "fig5-precise"] = "fig5"
    """May stand first, without --preset: the paper's 300 sequences for every W_QK, or 100,000."""
    panels: str = ""
    """Only the panels whose name contains this; all by default."""
    means: tuple[float, ...] = ()
    """Means of the eigenvalues, combined with every one of --scales."""
    scales: tuple[float, ...] = ()
    """Their standard deviations."""
    pairs: Annotated[Any, Suppress] = ()
    form: Annotated[Any, Suppress] = ""  # this and the next two tell the panels apart
    covariance: Annotated[Any, Suppress] = ""
    process: Annotated[Any, Suppress] = ""
    exact: Annotated[bool, Suppress] = True
    store: Path = Path("out/simulate")
    """Finished units are kept here, so that an interrupted simulation goes on."""
    out: Path | None = None
    """Draw the figure here: .html, .svg, .png, .pdf or .json."""
    json: bool = False
    """Print the summary and all profiles as JSON."""


_SUMMARY: Columns = {
    "mean": "mean:g",
    "scale": "scale:g",
    "ξ": "xi:.3f",
    "η": "eta:.3f",
    "peak ρ": "peak:.3f",
    "tokens on": lambda row: f"{row['first_on']}-{row['last_on']}",
    "entropy": lambda row: f"{row['entropy']:.3f} ± {row['entropy_error']:.3f}",
    "|sim − exact|": lambda row: f"{row['conditional_gap']:.4f}, counted {row['count_gap']:.4f}",
}


def do_simulate(arguments: Sequence[str]) -> None:
    """Simulate, then print a table, JSON or where the figure is."""
    arguments = with_first("preset", arguments)
    name: Any = flag("preset", arguments, "fig5")
    panels = preset(name if name in ("fig5", "fig5-precise") else "fig5")  # tyro says what is wrong
    default = SimulateCommand(**values(SimulateConfig, next(iter(panels.values()))))
    command = parse(SimulateCommand, "simulate", arguments, default=default)
    check_figure(command.out)
    simulations = {}
    for name, config in _chosen(command, panels).items():
        with progress(name) as report:
            simulations[name] = simulate(
                config, store=command.store, report=report, say=say, **values(EngineFlags, command)
            )
    if command.out is not None:
        from locater.paper.figures import fig5_chart
        from locater.report.charts import save_chart

        chart = fig5_chart(simulations, title="Simulated signal propagation (Fig. 5)")
        say(f"wrote {save_chart(chart, command.out)}")
    if command.json:
        print_json(
            {
                name: {"summary": made.summary(), "units": [unit.to_dict() for unit in made.units]}
                for name, made in simulations.items()
            }
        )
    else:
        for name, made in simulations.items():
            show(terminal_table(made.summary(), _SUMMARY, title=name))


def _chosen(
    command: SimulateCommand, panels: dict[str, SimulateConfig]
) -> dict[str, SimulateConfig]:
    """The panels that are asked for, with the flags' changes."""
    base = next(iter(panels.values()))
    given, before = (values(SimulateConfig, config) for config in (command, base))
    changes = {name: value for name, value in given.items() if value != before[name]}
    means = command.means or tuple(dict.fromkeys(mean for mean, _ in base.pairs))
    scales = command.scales or tuple(dict.fromkeys(scale for _, scale in base.pairs))
    changes["pairs"] = tuple((mean, scale) for mean in means for scale in scales)
    chosen = {name: config for name, config in panels.items() if command.panels in name}
    if not chosen:
        raise ConfigError(
            f"no panel's name contains {command.panels!r}.",
            hint="the panels: " + "; ".join(panels) + ".",
        )
    return {name: replace(config, **changes) for name, config in chosen.items()}
