"""Figures and tables of docs/theory-vs-reality.md from results/reality/*.json.

python benchmarks/draw_reality.py results/reality docs/theory-vs-reality.md
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import altair as alt
import torch

from locater.reality.against_theory import rank_correlation
from locater.reality.predictions import COLUMNS
from locater.report.charts import SCALE, save_chart
from locater.report.reality_view import entropy_chart, error_chart, profile_panels
from locater.report.tables import markdown_table, update_page

Study = dict[str, Any]
Studies = dict[str, Study]
QUICK = {
    "rho_error_means": "ρ: K, Σ, means",
    "rho_error_rotary": "ρ: … and rotation",
    "rho_error_full": "ρ: full moments",
    "rho_error_given_query": "ρ: given the query",
    "rho_noise": "ρ: noise of counting",
    "entropy_error_full": "entropy: full moments",
    "entropy_error_given_query": "entropy: given the query",
}


def main(results: Path, page: Path) -> None:
    studies = load(results)
    draw(studies, page.parent / "images")
    update_page(page, lambda name: table(studies, name))


def load(results: Path) -> Studies:
    """Real models first, then those of the laboratory."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: (not item[1]["side"], item[0])))


def draw(studies: Studies, images: Path) -> None:
    real = {name: study for name, study in studies.items() if study["side"]}
    for name, study in real.items():
        title = f"{name}: where the gates open"
        save_chart(profile_panels(study["profiles"], title=title), images / f"reality-{name}.svg")
    side_by_side = {
        "errors": [error_chart(s["layers"], title=name) for name, s in real.items()],
        "entropy": [entropy_chart(s["heads"], title=name) for name, s in real.items()],
        "kurtosis": [kurtosis_chart(s["heads"], title=name) for name, s in real.items()],
        "quantiles": [quantile_chart(s["quantiles"], title=name) for name, s in real.items()],
        "blocks": [
            study_chart(s["side"]["blocks"], title=name, axis="blocks that the moments come from")
            for name, s in real.items()
        ],
    }
    for name, charts in side_by_side.items():
        chart = alt.hconcat(*charts).resolve_scale(color="independent")
        save_chart(chart, images / f"reality-{name}.svg")


def study_chart(study: dict[str, Study], *, title: str = "", axis: str = "") -> Any:
    """Errors against one setting, such as the blocks that moments come from."""
    records = [
        {"setting": int(setting), "kind": label, "error": row[key]}
        for setting, row in study.items()
        for key, label in (
            ("rho_error_means", "ρ, K, Σ and means"),
            ("rho_error_rotary", "ρ, K, Σ, means and rotation"),
            ("rho_error_full", "ρ, full moments"),
            ("rho_error_given_query", "ρ, full moments, given the query"),
            ("entropy_error_given_query", "entropy (nats), given the query"),
            ("rho_noise", "ρ, noise of counting"),
        )
        if key in row and not (key == "rho_error_means" and "rho_error_rotary" in row)
    ]
    return (
        alt.Chart(
            alt.Data(values=records),
            title=title,
            width=300,
            height=220,
            description=f"Errors of predicted signal propagation and entropy against {axis}",
        )
        .mark_line(point=True)
        .encode(
            x=alt.X("setting:Q", title=axis, scale=alt.Scale(type="log", base=2)),
            y=alt.Y("error:Q", title="mean error", scale=alt.Scale(type="log")),
            color=alt.Color("kind:N", title=None, scale=alt.Scale(range=SCALE)),
            tooltip=["kind:N", "setting:Q", "error:Q"],
        )
    )


def kurtosis_chart(heads: Sequence[Study], *, title: str = "") -> Any:
    """Does it matter that logits are not Gaussian: kurtosis against the error of ρ, by head."""
    return (
        alt.Chart(
            alt.Data(
                values=[
                    {"kurtosis": row["logit_kurtosis"], "error": row["rho_error_full"]}
                    | {"layer": row["layer"], "head": row["head"]}
                    for row in heads
                ]
            ),
            title=title,
            width=300,
            height=220,
            description="Error of the predicted signal propagation against the excess kurtosis of "
            "logits, one point per head",
        )
        .mark_circle(size=40, opacity=0.8)
        .encode(
            x=alt.X(
                "kurtosis:Q", title="excess kurtosis of logits", scale=alt.Scale(type="symlog")
            ),
            y=alt.Y("error:Q", title="mean error of ρ, full moments"),
            color=alt.Color("layer:Q", scale=alt.Scale(scheme="viridis")),
            tooltip=["layer:Q", "head:Q", "kurtosis:Q", "error:Q"],
        )
    )


def quantile_chart(records: Sequence[Study], *, title: str = "") -> Any:
    """Are features Gaussian: quantiles of the standardized ones against the normal law's."""
    points = [{**one, "normal": NormalDist().inv_cdf(one["probability"])} for one in records]
    position = alt.X("normal:Q", title="quantile of a Gaussian")
    height = alt.Y("quantile:Q", title="quantile of standardized features")
    line = (
        alt.Chart(alt.Data(values=points))
        .mark_line(color="#888", strokeDash=[4, 3])
        .encode(x=position, y=alt.Y("normal:Q"))
    )
    dots = (
        alt.Chart(alt.Data(values=points))
        .mark_circle(size=22, opacity=0.6)
        .encode(
            x=position,
            y=height,
            color=alt.Color("kind:N", title=None, scale=alt.Scale(range=SCALE)),
            tooltip=["layer:Q", "kind:N", "probability:Q", "quantile:Q"],
        )
    )
    return alt.layer(line, dots).properties(
        width=300,
        height=260,
        title=title,
        description="Quantiles of standardized tokens, queries and keys of every layer against "
        "those of a Gaussian, with the diagonal",
    )


def table(studies: Studies, name: str) -> str:
    """One table of the page: `summary`, or `layers:minilm` and the like."""
    kind, _, model = name.partition(":")
    if kind in _OF_ALL:
        return _OF_ALL[kind](studies)
    return _OF_ONE[kind](studies[model])


def _summary(studies: Studies) -> str:
    """Mean |error| of ρ by prediction and model, and over all heads of the real models."""
    found = {key for study in studies.values() for key in study["summary"]}
    keys = {key: label for c, label in COLUMNS.items() if (key := f"rho_error_{c}") in found}
    keys |= {
        "rho_noise": "noise of counting",
        "law_error": "a Gaussian score with the mean and variance measured",
    }
    rows = [
        [
            label,
            *(_number(s["summary"].get(key)) for s in studies.values()),
            _all_heads(studies, key),
        ]
        for key, label in keys.items()
    ]
    sizes = [
        f"{name} ({s['summary']['heads']} heads, {s['summary']['estimated_on']} + "
        f"{s['summary']['measured_on']} blocks)"
        for name, s in studies.items()
    ]
    return _markdown(["mean error of ρ", *sizes, "all heads of the real models"], rows)


def _all_heads(studies: Studies, key: str) -> str:
    """Mean over all heads of the models that others trained; empty where one lacks it."""
    real = [study["summary"] for study in studies.values() if study["side"]]
    if any(key not in one for one in real):
        return ""
    heads = sum(one["heads"] for one in real)
    return _number(sum(one[key] * one["heads"] for one in real) / heads)


def _entropy(studies: Studies) -> str:
    rows = []
    for c, label in COLUMNS.items():
        cells = []
        for study in studies.values():
            total = study["summary"]
            error, rank = (
                total.get(f"{kind}_{c}") for kind in ("entropy_error", "rank_correlation_entropy")
            )
            is_ranked = rank is not None and total["heads"] > 2
            text = "" if error is None else f"{error:.3f}"
            cells.append(f"{text} ({rank:.3f})" if text and is_ranked else text)
        if any(cells):
            rows.append([label, *cells, _all_heads(studies, f"entropy_error_{c}")])
    measured = [
        f"{min(e):.2f} to {max(e):.2f}"
        for e in ([row["entropy"] for row in s["heads"]] for s in studies.values())
    ]
    rows.append(["entropies measured, nats", *measured, ""])
    bounds = [
        _number(s["summary"]["entropy"] - s["summary"]["entropy_bound"]) for s in studies.values()
    ]
    rows.append(["mean entropy above its lower bound (Eq. 9)", *bounds, ""])
    head = [
        "mean error of entropy, nats (rank correlation)",
        *studies,
        "all heads of the real models",
    ]
    return _markdown(head, rows)


def _logits(studies: Studies) -> str:
    """Means and variances of logits, attention by position, order of heads and positions."""
    rows = []
    for c in COLUMNS:
        for key, label in (
            ("logit_mean_error", "error of the logits' mean"),
            ("logit_variance_ratio", "logits' variance, predicted/measured"),
            ("attention_error", "total variation of mean attention"),
            ("rank_correlation_rho", "rank correlation of heads by mean ρ"),
            ("position_correlation", "median correlation of ρ over positions"),
        ):
            cells = [_number(s["summary"].get(f"{key}_{c}")) for s in studies.values()]
            if c in ("printed", "means", "rotary", "full") and any(cells):
                rows.append([COLUMNS[c], label, *cells])
    return _markdown(["prediction", "quantity", *studies], rows)


def _layers(study: Study) -> str:
    layers = study["layers"]
    columns = [c for c in COLUMNS if f"rho_error_{c}" in layers[0]]
    rows = [
        [
            str(layer["layer"]),
            *(f"{layer[f'rho_error_{c}']:.3f}" for c in columns),
            f"{layer['rho_noise']:.3f}",
            f"{layer['entropy_error_full']:.3f}",
            f"{layer['entropy_error_given_query']:.3f}",
            f"{layer['explained']:.2f}",
        ]
        for layer in layers
    ]
    names = [COLUMNS[c] for c in columns]
    head = ["layer", *names, "noise", "entropy: full", "given the query", "K ⊗ Σ explains"]
    return _markdown(head, rows)


def _worst(study: Study) -> str:
    rows = [
        [
            f"{row['layer']}.{row['head']}",
            *(f"{row[f'rho_error_{c}']:.3f}" for c in ("printed", "full", "given_query")),
            f"{row['rho_error_in_sample_full']:.3f}",
            f"{row['law_error']:.3f}",
            f"{row['logit_kurtosis']:.1f}",
            f"{row['sink_mass']:.2f}",
            f"{row['entropy']:.2f}, {row['entropy_full']:.2f}",
        ]
        for row in sorted(study["heads"], key=lambda row: -row["rho_error_full"])[:8]
    ]
    head = [
        "layer.head", "printed", "full", "given the query", "full, in sample", "Gaussian law",
        "kurtosis of logits", "first key", "entropy, predicted",
    ]  # fmt: skip
    return _markdown(head, rows)


def _reasons(studies: Studies) -> str:
    """What goes with a head's error, by rank correlation over heads."""
    rows = []
    for key, label in (
        ("logit_kurtosis", "excess kurtosis of its logits"),
        ("law_error", "what a Gaussian law with the measured moments misses"),
        ("rho_noise", "noise of counting"),
        ("sink_mass", "attention on the first key"),
        ("entropy", "entropy"),
    ):
        cells = []
        for study in studies.values():
            error = torch.tensor([row["rho_error_full"] for row in study["heads"]])
            other = torch.tensor([row[key] for row in study["heads"]])
            is_many = len(error) > 9
            cells.append(f"{rank_correlation(error, other):.2f}" if is_many else "")
        rows.append([label, *cells])
    return _markdown(["rank correlation of a head's error of ρ (full) with", *studies], rows)


def _gaussian(studies: Studies) -> str:
    rows = []
    for kind, key in (
        ("tokens", "token_kurtosis"),
        ("token projections", "projection_kurtosis"),
        ("queries", "query_kurtosis"),
        ("keys", "key_kurtosis"),
    ):
        cells = []
        for study in studies.values():
            layers = study["layers"]
            share = [layer["not_gaussian"][kind] for layer in layers]
            tails = [layer[key] for layer in layers]
            cells.append(f"{_range(share)} rejected, kurtosis {_range(tails)}")
        rows.append([kind, *cells])
    return _markdown(["features", *studies], rows)


def _why(studies: Studies) -> str:
    rows = []
    for part, text in (("effects", "moves ρ by"), ("shares", "share of the logits")):
        names = dict.fromkeys(n for s in studies.values() for n in s["heads"][0]["why"][part])
        for name in names:
            cells = []
            for study in studies.values():
                values = [row["why"][part].get(name) for row in study["heads"]]
                found = [value for value in values if value is not None]
                cells.append(f"{sum(found) / len(found):.3f}" if found else "")
            rows.append([f"{'without ' if part == 'effects' else ''}{name}", text, *cells])
    leading = [Counter(row["why"]["leading"] for row in s["heads"]) for s in studies.values()]
    names = [", ".join(f"{name} {count}" for name, count in one.most_common()) for one in leading]
    rows.append(["the ingredient that matters most", "heads", *names])
    return _markdown(["ingredient", "", *studies], rows)


def _side(name: str, label: str) -> Callable[[Study], str]:
    def make(study: Study) -> str:
        settings: dict[str, Any] = study["side"][name]
        if name == "other_text":
            settings = {"the same": study["side"]["blocks"][max(study["side"]["blocks"], key=int)],
                        "Python's documentation": settings["other"]}  # fmt: skip
        keys = [key for key in QUICK if any(key in row for row in settings.values())]
        if "rho_error_rotary" in keys:
            keys.remove("rho_error_means")
        rows = [
            [setting, *(f"{row[key]:.3f}" for key in keys)] for setting, row in settings.items()
        ]
        return _markdown([label, *(QUICK[key] for key in keys)], rows)

    return make


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(rows, head) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


_OF_ALL: dict[str, Callable[[Studies], str]] = {
    "summary": _summary,
    "entropy": _entropy,
    "logits": _logits,
    "reasons": _reasons,
    "gaussian": _gaussian,
    "why": _why,
}
_OF_ONE: dict[str, Callable[[Study], str]] = {
    "layers": _layers,
    "worst": _worst,
    "blocks": _side("blocks", "blocks that the moments come from"),
    "tokens": _side("tokens", "T"),
    "other_text": _side("other_text", "text measured on"),
}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
