"""Everybody's theory on real models: makes results/theories/NAME.json, and the page's table.

python benchmarks/study_theories.py MODEL TEXT --name minilm [--special] [--blocks 600]
python benchmarks/study_theories.py --page docs/theories.md
"""

from __future__ import annotations

import json
from typing import Any

from studies import asked_blocks, has_page, study_parser
from studies import load as load

from locater.files import write_file
from locater.models.loading import load_model
from locater.reality.against_theory import RealityConfig
from locater.reality.theories import MEASURED, theories
from locater.report.tables import markdown_table


def main() -> None:
    given = study_parser(__doc__, "theories", blocks=600).parse_args()
    if has_page(given, table):
        return
    model, tokenizer = load_model(given.model)
    found = theories(model, asked_blocks(given, tokenizer), RealityConfig(draws=400)).to_dict()
    data = rounded({"model": given.name, **found})
    path = write_file(given.out / f"{given.name}.json", json.dumps(data, ensure_ascii=False) + "\n")
    print("wrote", path)


def rounded(data: Any) -> Any:
    """Four significant digits: no table shows more."""
    text = json.dumps(data, ensure_ascii=False)
    return json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))


def table(studies: dict[str, Any], name: str) -> str:
    """One of the page's tables."""
    return {"error": errors, "order": orders, "also": also, "quantities": quantities}[name](
        studies
    ) + "\n"


def _found(study: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in study["theories"]}


def _names(studies: dict[str, Any]) -> list[str]:
    """Every theory of any model, in the order of the tables."""
    every = {name: None for study in studies.values() for name in _found(study)}
    longest = max(studies.values(), key=lambda study: len(study["theories"]))
    return list(dict.fromkeys([*_found(longest), *every]))


def _row(studies: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found[name] for one in studies.values() if name in (found := _found(one)))


def _cells(studies: dict[str, Any], name: str, key: str, digits: int) -> list[str]:
    values = [_found(study).get(name, {}).get(key) for study in studies.values()]
    return ["" if value is None else f"{value:.{digits}f}" for value in values]


def _mean(studies: dict[str, Any], name: str, key: str) -> float:
    values = [_found(study).get(name, {}).get(key) for study in studies.values()]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def errors(studies: dict[str, Any]) -> str:
    """Mean |value − measured|, the best first."""
    names = [one for one in _names(studies) if _row(studies, one)["error"] is not None]
    names.sort(key=lambda one: (_row(studies, one)["target"], _mean(studies, one, "error")))
    heads = [f"{name} ({len(study['heads'])})" for name, study in studies.items()]
    rows = [
        [one, _row(studies, one)["target"], _row(studies, one)["kind"],
         *_cells(studies, one, "error", 3)]
        for one in names
    ]  # fmt: skip
    return markdown_table(rows, ["theory", "about", "kind", *heads])


def orders(studies: dict[str, Any]) -> str:
    """Rank correlation with what a theory is about, the best first."""
    names = _names(studies)
    names.sort(key=lambda one: (_row(studies, one)["target"], -_mean(studies, one, "orders")))
    rows = [
        [one, _row(studies, one)["target"], *_cells(studies, one, "orders", 2)] for one in names
    ]
    return markdown_table(rows, ["theory", "about", *studies])


def also(studies: dict[str, Any]) -> str:
    """Signed rank correlations with everything measured, mean over models."""
    rows = []
    for one in _names(studies):
        found = [_found(study)[one]["order"] for study in studies.values() if one in _found(study)]
        cells = []
        for name in MEASURED:
            known = [order[name] for order in found if order[name] is not None]
            cells.append(f"{sum(known) / len(known):.2f}" if known else "")
        rows.append([one, *cells])
    return markdown_table(rows, ["theory", *MEASURED])


def quantities(studies: dict[str, Any]) -> str:
    """What every theory is, knows, costs and assumes."""
    rows = []
    for one in _names(studies):
        row = _row(studies, one)
        each = [
            1000 * _found(study)[one]["seconds"] / len(study["heads"])
            for study in studies.values()
            if one in _found(study)
        ]
        rows.append([one, row["source"], row["knows"], f"{sum(each) / len(each):.1f}",
                     row["outside"]])  # fmt: skip
    return markdown_table(rows, ["theory", "source", "knows", "ms a head", "outside its domain"])


if __name__ == "__main__":
    main()
