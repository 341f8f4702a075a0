"""Theory against copying on real models: makes results/reality/models/NAME.json, resumable.

python benchmarks/study_models.py MODEL TEXT --name minilm [--special] [--lengths 128 256 512] \\
    [--others code=code.txt german=german.txt] [--layers REGEX]
python benchmarks/study_models.py --page docs/real-models.md
Moments and copied counts come from the first half of the blocks, the truth from the second.  Errors
are given without what counting blocks adds to them: √(gap² − standard error²), zero at least.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from studies import has_page, stored, study_parser
from studies import load as load

from locater.errors import LocaterError
from locater.files import write_file
from locater.models.loading import load_model, read_text, text_blocks
from locater.reality.against_theory import RealityConfig, against_theory
from locater.reality.predictions import COLUMNS as TITLES
from locater.report.tables import markdown_table

COLUMNS = ("printed", "means", "rotary", "full", "given_query", "clusters", "copy")
Rows = list[dict[str, Any]]
ASKED = {"last": "the last query", "middle": "a middle query", "first": "the opening token",
         "closing": "a closing token"}  # fmt: skip


def main() -> None:
    parser = study_parser(__doc__, "reality/models", blocks=800)
    parser.add_argument("--side-blocks", type=int, default=200)
    parser.add_argument("--lengths", type=int, nargs="*", default=[])
    parser.add_argument("--others", nargs="*", default=[], help="more texts, NAME=FILE")
    parser.add_argument("--layers", default=None, help="of the side studies, as a regex")
    given = parser.parse_args()
    if has_page(given, table):
        return
    path, result = stored(given, "items")
    model, tokenizer = load_model(given.model)
    for name, make in items(given, model, tokenizer):
        if name in result["items"]:
            continue
        start = time.perf_counter()
        try:
            found = make()
        except LocaterError as error:
            found = {"skipped": str(error).splitlines()[0]}
        result["items"][name] = {**found, "seconds": round(time.perf_counter() - start)}
        write_file(path, json.dumps(result, indent=1))
        shown = {one: each["rho"]["mean"] for one, each in found.get("columns", {}).items()}
        print(given.name, name, shown or found, flush=True)


def items(
    given: Any, model: Any, tokenizer: Any
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What is asked, and what answers it."""
    text = read_text(given.text)

    def cut(text: str, tokens: int, count: int) -> torch.Tensor:
        return text_blocks(tokenizer, text, tokens=tokens, blocks=count, special=given.special)

    def held(blocks: torch.Tensor, *, every: bool = False, **more: Any) -> dict[str, Any]:
        other = more.pop("other", None)
        layers = None if every else given.layers
        config = RealityConfig(exact=False, draws=400, layers=layers, **more)
        reality = against_theory(model, blocks, config, other=other)
        rows = reality.rows()
        found = {"heads": len(rows), "blocks": reality.measured_on, "columns": summary(rows)}
        found["rho_noise"] = mean([row["rho_noise"] for row in rows])
        found["skipped"] = reality.skipped
        return found | ({"rows": lean(rows)} if every else {})

    few = given.side_blocks
    yield "last", lambda: held(cut(text, given.tokens, given.blocks), every=True)
    yield "middle", lambda: held(cut(text, given.tokens, few), query=given.tokens // 2)
    if getattr(tokenizer, "sep_token_id", None) is not None:
        yield "first", lambda: held(cut(text, given.tokens, few), query=0)
        yield "closing", lambda: held(closed(cut(text, given.tokens, few), tokenizer))
    for pair in given.others:
        name, _, path = pair.partition("=")

        def on_other(path: str = path) -> dict[str, Any]:
            blocks = cut(text, given.tokens, given.blocks)
            other = cut(read_text(path), given.tokens, few // 2)
            return held(blocks, other=other)

        yield f"text:{name}", on_other
    for tokens in given.lengths:
        yield f"tokens:{tokens}", lambda tokens=tokens: held(cut(text, tokens, few))  # type: ignore[misc]


def closed(blocks: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """The blocks with the model's closing token as their last."""
    blocks = blocks.clone()
    blocks[:, -1] = tokenizer.sep_token_id
    return blocks


def summary(rows: Rows) -> dict[str, Any]:
    """Errors of every prediction over heads, without counting noise."""
    found: dict[str, Any] = {}
    for column in COLUMNS:
        if f"rho_error_{column}" not in rows[0]:
            continue
        found[column] = {"rho": spread({_head(row): rho_error(row, column) for row in rows})}
        if f"entropy_{column}" in rows[0]:
            errors = {_head(row): entropy_error(row, column) for row in rows}
            found[column]["entropy"] = spread(errors)
    return found


def rho_error(row: dict[str, Any], column: str) -> float:
    """Root mean square over positions, without what counting adds."""
    error: float = row[f"rho_beyond_noise_{column}"]
    return error


def entropy_error(row: dict[str, Any], column: str) -> float:
    """The gap, without what finitely many blocks add."""
    gap = row[f"entropy_{column}"] - row["entropy"]
    return math.sqrt(max(gap**2 - row["entropy_standard_error"] ** 2, 0.0))


def spread(errors: dict[str, float]) -> dict[str, Any]:
    """Mean, median, 90th percentile and the worst head."""
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    worst = max(errors, key=lambda head: errors[head])
    return {
        "mean": round(values.mean().item(), 4),
        "median": round(values.median().item(), 4),
        "p90": round(values.quantile(0.9).item(), 4),
        "worst": round(errors[worst], 4),
        "worst_head": worst,
    }


def lean(rows: Rows) -> Rows:
    """What the tables and figures of all heads need."""
    kept = ("layer", "head", "entropy", "sink_mass", "mean_rho", "logit_kurtosis")
    return [
        {name: row[name] if isinstance(row[name], int) else round(row[name], 4) for name in kept}
        | {
            f"{kind}_{column}": round(error(row, column), 4)
            for kind, error in (("rho", rho_error), ("entropy", entropy_error))
            for column in COLUMNS
            if f"{kind if kind == 'entropy' else 'rho_error'}_{column}" in row
        }
        for row in rows
    ]


def _head(row: dict[str, Any]) -> str:
    return f"{row['layer']}.{row['head']}"


def mean(values: list[float]) -> float:
    """Rounded to four digits."""
    return round(sum(values) / len(values), 4)


def table(studies: dict[str, Any], name: str) -> str:
    """One of the page's tables: `rho`, `entropy`, or `sides`."""
    return (sides(studies) if name == "sides" else errors(studies, name)) + "\n"


def errors(studies: dict[str, Any], kind: str) -> str:
    """Mean (median, 90th percentile, worst head) of every prediction and model."""
    lines = []
    for name, study in studies.items():
        item = study["items"]["last"]
        cells = []
        for column in COLUMNS:
            found = item["columns"].get(column, {}).get(kind)
            words = "{mean:.3f} ({median:.3f}, {p90:.3f}, {worst:.2f} at {worst_head})"
            cells.append("" if found is None else words.format(**found))
        lines.append([name, item["heads"], item["blocks"], *cells])
    return markdown_table(lines, ["model", "heads", "blocks", *(TITLES[one] for one in COLUMNS)])


def sides(studies: dict[str, Any]) -> str:
    """Other queries, texts and lengths: mean errors."""
    shown = ("means", "rotary", "full", "given_query", "clusters", "copy")
    lines = []
    for name, study in studies.items():
        for asked, item in study["items"].items():
            if asked == "last" or "columns" not in item:
                continue
            what, _, value = asked.partition(":")
            words = {"text": f"text: {value}", "tokens": f"T = {value}"}.get(what, ASKED.get(what))
            cells = []
            for column in shown:
                found = item["columns"].get(column, {})
                pair = [found[kind]["mean"] for kind in ("rho", "entropy") if kind in found]
                cells.append(", ".join(f"{one:.3f}" for one in pair))
            lines.append([name, words, item["heads"], item["blocks"], *cells])
    titles = [TITLES[one] for one in shown]
    return markdown_table(lines, ["model", "asked", "heads", "blocks", *titles])


if __name__ == "__main__":
    main()
