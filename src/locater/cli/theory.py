"""`locater theory`: where attention looks for one eigenspectrum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from locater.cli.terminal import parse, print_json, say, show
from locater.core.form import QKForm
from locater.core.process import TokenProcess
from locater.core.theory import classify
from locater.engines import one_thread
from locater.paper.curves import rho_curves
from locater.report.tables import terminal_table


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


def run(arguments: Sequence[str]) -> None:
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
