"""What the repository keeps of a sweep: its results, the package's table and a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.coverage.causes import causes_of

from locater.models.coverage import Known

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "coverage.json"
TABLE = ROOT / "src" / "locater" / "models" / "coverage.json"
PAGE = ROOT / "docs" / "coverage.md"
KEPT = ("model_type", "architecture", "status", "gap", "file_gap", "attentions", "counts",
        "is_named", "missing", "notes")  # fmt: skip
ORDER = ("verified", "skipped", "partly", "missed", "wrong")
"""From the best to the worst that may come out for a class of a model type."""
UNTESTED = {
    "cannot build": "no tiny model of this type was put to the test",
    "no softmax attention": "it has no softmax attention",
}

Records = Mapping[str, Mapping[str, Any]]


def publish(records: Records) -> None:
    """Write all three."""
    version = max(one["transformers"] for one in records.values() if one.get("transformers"))
    kept = {
        name: {key: _rounded(one[key]) for key in KEPT if one.get(key)}
        for name, one in sorted(records.items())
    }
    RESULTS.write_text(_lines({"transformers": [version]}, "families", kept))
    TABLE.write_text(_lines({"transformers": version}, "types", types(records)))
    table = json.loads(TABLE.read_text())
    PAGE.write_text(page(known_of(table)))


def known_of(table: Mapping[str, Any]) -> list[Known]:
    """The table's records."""
    version = table["transformers"]
    return [
        Known(name, one["status"], one.get("gap"), tuple(one.get("missing", ())), version)
        for name, one in table["types"].items()
    ]


def types(records: Records) -> dict[str, dict[str, Any]]:
    """One line per model type: the worst that came out for its classes and settings."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in records.values():
        groups.setdefault(one.get("model_type") or one["family"].partition(" as ")[0], []).append(
            one
        )
    return {name: _type(groups[name]) for name in sorted(groups)}


def _type(group: list[Mapping[str, Any]]) -> dict[str, Any]:
    tested = [one for one in group if one["status"] in ORDER]
    if not tested:
        return {"status": None, "missing": [UNTESTED[group[0]["status"]]]}
    statuses = {one["status"] for one in tested}
    status = max(statuses, key=ORDER.index)
    status = {"missed": "wrong"}.get(status, status)
    if status == "skipped" and len(statuses) > 1:
        status = "partly"
    gaps = [one[key] for one in tested for key in ("gap", "file_gap") if one.get(key) is not None]
    result = {"status": status}
    if gaps:
        result["gap"] = _rounded(max(gaps))
    missing = dict.fromkeys(cause for one in tested for cause in causes_of(one))
    if missing and status != "verified":
        result["missing"] = list(missing)
    return result


def _rounded(value: Any) -> Any:
    """Numbers to two digits, infinite ones as none: JSON has no others."""
    if isinstance(value, float):
        return float(f"{value:.2g}") if math.isfinite(value) else None
    return value


def _lines(head: Mapping[str, Any], name: str, rows: Mapping[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in rows.items())
    return f'{json.dumps(head)[:-1]},\n "{name}": {{\n{lines}\n}}}}\n'


def page(types: Iterable[Known]) -> str:
    """A table that a user searches for their model."""
    tested = [one for one in types if one.status is not None]
    counts = Counter(one.status for one in tested)
    share = counts["verified"] / max(len(tested), 1)
    version = tested[0].transformers if tested else ""
    head = f"""# Which models are read rightly

Of {len(tested)} model types with softmax attention in transformers {version},
**{counts["verified"]} ({share:.0%}) are verified**; {counts["partly"]} in part, {counts["wrong"]}
have a known gap, {counts["skipped"]} are not read.

Every type is shrunk to a tiny model with random weights and run; the logits of each attention's
form, from the live model and from the file that it saves, are held against what enters the model's
own softmax, up to a constant per row. *Verified* means: all of them agree, the audit, LocAteR and
Probe work on it, and forms that are wrong on purpose do not fit. The gap is the largest difference
in standard deviations of the logits. `python -m tests.coverage.sweep` makes it again (about 20
minutes); this page is written by its `--publish`.

| model type | status | gap | what is missing |
|---|---|---|---|
"""
    rows = [
        f"| {one.model_type} | {_status(one)} | {'' if one.gap is None else f'{one.gap:.0e}'} | "
        f"{'; '.join(one.missing)} |"
        for one in tested
    ]
    return head + "\n".join(rows) + "\n"


def _status(one: Known) -> str:
    return {"wrong": "known gap", "skipped": "not read"}.get(str(one.status), str(one.status))
