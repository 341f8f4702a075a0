"""What a probe measured on a text: tables, a map of the heads, and a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from locater.report.tables import Columns, markdown_table, plain_markdown

Record = dict[str, Any]


def _name(record: Record) -> str:
    return record["name"] if record["layer"] is None else str(record["layer"])


def _share(head: Record) -> float:
    """Entropy as a share of that of uniform attention."""
    entropy, most = head["entropy"], head["max_entropy"]
    return math.nan if entropy is None or not most else entropy / most


def _rho(head: Record) -> float | None:
    """ρ of the last query, averaged over the keys that it sees."""
    known = [value for value in head["last_rho"] if value is not None]
    return sum(known) / len(known) if known else None


def _number(value: Callable[[Record], float | None], digits: int) -> Callable[[Record], str | None]:
    def shown(record: Record) -> str | None:
        known = value(record)
        return None if known is None or math.isnan(known) else f"{known:.{digits}f}"

    return shown


HEADS: Columns = {
    "layer": _name,
    "head": "head",
    "entropy": _number(itemgetter("entropy"), 3),
    "/ ln T": _number(_share, 3),
    "ρ": _number(_rho, 3),
    "largest logit": _number(itemgetter("max_logit"), 1),
    "on first key": _number(itemgetter("sink_mass"), 3),
    "distance": _number(itemgetter("distance"), 1),
}
"""Of a head: ρ is how often a token's gradient passes the softmax, the distance that to the keys it
looks at."""
LAYERS: Columns = {
    "layer": _name,
    "similarity": _number(itemgetter("similarity"), 3),
    "effective rank": _number(itemgetter("effective_rank"), 2),
    "residual": _number(itemgetter("residual"), 3),
}
"""Of the tokens that enter an attention."""


def sharpest_first(heads: Sequence[Record]) -> list[Record]:
    """The lowest share of the largest entropy first."""
    return sorted(heads, key=_share)


MAPS = {
    "share": "entropy / ln T",
    "rho": "ρ of the last query",
    "sink_mass": "attention on the first key",
}


def probe_map(heads: Sequence[Record], *, title: str = "") -> Any:
    """Layers × heads in three maps: how sharp, how trainable, how much on the first key."""
    import altair as alt

    from locater.report.charts import head_map

    records = [
        {
            "layer": _name(head),
            "head": head["head"],
            "share": _share(head),
            "rho": _rho(head),
            "sink_mass": head["sink_mass"],
        }
        for head in heads
    ]
    data, scale = alt.Data(values=records), alt.Scale(scheme="viridis", domain=[0, 1])
    panels = [
        head_map(
            data,
            list(dict.fromkeys(record["layer"] for record in records)),
            color=alt.Color(f"{column}:Q", title=None, scale=scale),
            tooltip=["layer:N", "head:O", *(alt.Tooltip(f"{one}:Q", format=".3f") for one in MAPS)],
            title=words,
            description=f"A map of {len(records)} heads by {words}.",
        )
        for column, words in MAPS.items()
    ]
    return alt.hconcat(*panels, title=title)


def save_probe(data: Record, path: Path, *, title: str) -> Path:
    """Write a page (.html) with maps and tables, or the maps alone as a figure."""
    from locater.report.charts import save_page, specification
    from locater.report.page import Section

    maps = probe_map(data["heads"], title=title)
    alarms = "\n".join(f"- {plain_markdown(one['message'])}" for one in data["alarms"])
    sections = [
        Section(
            key="maps",
            title="What the heads do",
            chart=specification(maps),
            caption="Entropy as a share of uniform attention's, ρ (how often a token's gradient "
            "passes the softmax) of the last query, and attention on the first key.",
        ),
        Section(
            key="heads",
            title="Heads",
            text=markdown_table(sharpest_first(data["heads"]), HEADS, is_plain=True),
        ),
        Section(
            key="layers",
            title="Tokens that enter each layer",
            text=markdown_table(data["layers"], LAYERS, is_plain=True),
        ),
        Section(key="alarms", title="Alarms", text=alarms or "None of the rules fired."),
    ]
    intro = (
        f"{len(data['heads'])} heads on {data['blocks']} blocks of {data['tokens']} tokens, "
        "measured on the model's own attention. `locater explain` holds them against the theory."
    )
    return save_page(path, maps, f"Probe: {title}", sections, intro=intro)
