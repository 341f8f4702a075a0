"""Figures and tables of docs/theory-vs-reality.md from results/reality/*.json.

python benchmarks/draw_reality.py results/reality docs/images > tables.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import altair as alt

from locater.reality_records import COLUMNS, rank_correlation
from locater.report.figures import save_chart
from locater.report.reality_figures import (
    entropy_chart,
    error_chart,
    kurtosis_chart,
    profile_panels,
    study_chart,
)


def main(results: Path, images: Path) -> None:
    studies = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    for name, study in studies.items():
        title = f"{name}: where the gates open"
        save_chart(profile_panels(study["profiles"], title=title), images / f"reality-{name}.svg")
    side_by_side = {
        "errors": [error_chart(s["layers"], title=name) for name, s in studies.items()],
        "entropy": [entropy_chart(s["heads"], title=name) for name, s in studies.items()],
        "kurtosis": [kurtosis_chart(s["heads"], title=name) for name, s in studies.items()],
        "blocks": [
            study_chart(s["side"]["blocks"], title=name, axis="blocks that the moments come from")
            for name, s in studies.items()
        ],
    }
    for name, charts in side_by_side.items():
        chart = alt.hconcat(*charts).resolve_scale(color="independent")
        save_chart(chart, images / f"reality-{name}.svg")
    for name, study in studies.items():
        _summary(name, study)
        _layers(study)
        _worst(study)
        _side(study)


def _summary(name: str, study: dict[str, Any]) -> None:
    total = study["summary"]
    print(f"\n## {name}: {total['heads']} heads, {total['estimated_on']} + {total['measured_on']}")
    print(f"model {study['model_seconds']:.0f} s, theory {study['theory_seconds']:.0f} s\n")
    print(
        "| prediction | ρ error | rank corr. ρ | position corr. | entropy error | rank corr. | TV |"
    )
    print("|---|---|---|---|---|---|---|")
    for column, label in COLUMNS.items():
        if f"rho_error_{column}" in total:
            cells = [
                _number(total.get(key))
                for key in (
                    f"rho_error_{column}",
                    f"rank_correlation_rho_{column}",
                    f"position_correlation_{column}",
                    f"entropy_error_{column}",
                    f"rank_correlation_entropy_{column}",
                    f"attention_error_{column}",
                )
            ]
            print(f"| {label} | " + " | ".join(cells) + " |")
    for key in ("rho_noise", "law_error", "rho_error_in_sample_full", "entropy", "entropy_bound"):
        print(f"{key}: {total[key]:.4f}")
    for key, value in total.items():
        if key.startswith(("logit_mean_error", "logit_variance_ratio", "rho_error_in_sample")):
            print(f"{key}: {value:.4f}")


def _layers(study: dict[str, Any]) -> None:
    layers = study["layers"]
    columns = [c for c in COLUMNS if f"rho_error_{c}" in layers[0]]
    head = " | ".join(COLUMNS[c] for c in columns)
    print(f"\n| layer | {head} | noise | entropy | Kronecker share | kurtosis of tokens, logits |")
    print("|" + "---|" * (len(columns) + 5))
    for layer in layers:
        cells = [f"{layer[f'rho_error_{c}']:.3f}" for c in columns]
        best = "rotary" if "rotary" in columns else "means"
        cells += [
            f"{layer['rho_noise']:.3f}",
            ", ".join(f"{layer[f'entropy_error_{c}']:.3f}" for c in (best, "full", "given_query")),
            f"{layer['explained']:.2f}",
            f"{layer['token_kurtosis']:.2f}, {layer['logit_kurtosis']:.2f}",
        ]
        print(f"| {layer['layer']} | " + " | ".join(cells) + " |")


def _worst(study: dict[str, Any]) -> None:
    import torch

    heads = study["heads"]
    names = "ρ error | given the query | in sample | law | noise | kurtosis | first | entropy"
    print(f"\n| layer | head | {names} |")
    print("|" + "---|" * 10)
    for row in sorted(heads, key=lambda row: -row["rho_error_full"])[:8]:
        keys = ("rho_error_full", "rho_error_given_query", "rho_error_in_sample_full")
        keys = (*keys, "law_error", "rho_noise")
        cells = [f"{row[key]:.3f}" for key in keys]
        cells += [f"{row['logit_kurtosis']:.1f}", f"{row['sink_mass']:.2f}"]
        cells += [f"{row['entropy']:.2f}/{row['entropy_full']:.2f}"]
        print(f"| {row['layer']} | {row['head']} | " + " | ".join(cells) + " |")
    error = torch.tensor([row["rho_error_full"] for row in heads])
    for key in ("logit_kurtosis", "sink_mass", "entropy", "law_error", "rho_noise"):
        other = torch.tensor([row[key] for row in heads])
        print(f"rank correlation of the error with {key}: {rank_correlation(error, other):.3f}")
    leading: dict[str, int] = {}
    for row in heads:
        leading[row["why"]["leading"]] = leading.get(row["why"]["leading"], 0) + 1
    print(f"leading: {leading}")
    for part in ("shares", "effects"):
        means = {
            key: sum(row["why"][part][key] for row in heads) / len(heads)
            for key in heads[0]["why"][part]
        }
        print(part, {key: round(value, 3) for key, value in means.items()})
    layers = study["layers"]
    for kind in layers[0]["not_gaussian"]:
        share = [layer["not_gaussian"][kind] for layer in layers]
        print(f"not Gaussian, {kind}: {min(share):.2f}-{max(share):.2f}")


def _side(study: dict[str, Any]) -> None:
    for name, rows in study["side"].items():
        print(f"\n{name}:")
        for setting, row in rows.items():
            print(f"  {setting}: {row}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
