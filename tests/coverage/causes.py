"""What the results have in common: families by the cause that keeps them from being verified."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CAUSES: tuple[tuple[str, str], ...] = (
    (r"which no caveat names", "norm of queries and keys, not declared"),
    (r"right but for the norm of queries and keys", "norm of queries and keys, declared"),
    (r"norm of queries or keys, not declared", "norm of queries and keys, not declared"),
    (r"latent attention|several projections make one", "latent attention (MLA)"),
    (r"several products are added", "products with position embeddings are added"),
    (r"added to the scores: products with", "products with relative position tables are added"),
    (r"sinks", "learned sinks"),
    (
        r"added to the scores: .*(relative|rel_pos|bias|logit_scale)",
        "relative position bias by table",
    ),
    (r"a term by position alone", "a bias by position that the form does not know"),
    (r"soft-cap, not declared", "soft-cap, not declared"),
    (r"no rotation", "no rotation in this layer (NoPE)"),
    (r"rotation: interleaved", "rotation pairs neighbours (interleaved)"),
    (r"the other way round", "rotation turns the other way round"),
    (r"rotation: half", "rotation that the form does not know"),
    (r"rotated in another way", "rotation in 2-D or by sections"),
    (r"number of heads: ", "number of heads is another setting"),
    (r"cut: ", "fused tensor is cut otherwise"),
    (r"temperature per (head|query)", "temperature per head or per query"),
    (r"^temperature ÷", "temperature"),
    (r"file against live: .*(query|key)", "file against live: heads or cut"),
    (r"file against live: .*rotation", "file against live: rotation"),
    (r"file against live: temperature", "file against live: temperature"),
    (r"file: the number of heads", "file: the part of the config is not found"),
    (r"file: .*names are those of", "file: fused names need a model type"),
    (r"file: ", "file: stored under names that no recipe reads"),
    (r"the number of heads is not known", "live: the number of heads is not found"),
    (r"names are those of", "fused names need a model type"),
    (r"but the config says head_dim", "head dimension differs between layers"),
    (r"no recipe (reads|finds)", "no recipe reads its names"),
    (r"no eigenvalues", "queries and keys read different widths"),
    (r"heads do not divide|cannot share", "heads do not divide the rows"),
    (r"did not run|do not vary|one key alone", "not run by this test"),
    (r"meet in no softmax", "linear or other attention, read as softmax attention"),
    (r"not in the form|no form has", "a term that the form does not have"),
    (r"do not line up", "pooled, chunked or chosen queries and keys"),
    (r"keys are hidden", "a window that no caveat declares"),
    (r"norm before", "the norm before the attention"),
    (r"^probe", "probe"),
    (r"^LocAteR", "LocAteR"),
    (r"^audit", "audit"),
)


def causes(words: str) -> list[str]:
    """The causes that a sentence of a record names."""
    found = []
    for part in words.split("; "):
        part = re.sub(r"^\w+ \(\d+\): ", "", part)
        found += [cause for pattern, cause in CAUSES if re.search(pattern, part)][:1]
    return list(dict.fromkeys(found)) or ["not explained"]


def by_cause(records: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Families by cause; those with several causes are named under each."""
    groups: dict[str, list[str]] = {}
    for record in records:
        for cause in dict.fromkeys(causes_of(record)):
            groups.setdefault(cause, []).append(record["family"])
    return dict(sorted(groups.items(), key=lambda one: -len(one[1])))


def causes_of(record: Mapping[str, Any]) -> Iterator[str]:
    """What keeps a record from being verified."""
    sites = record.get("sites", ())
    for site in sites:
        if site["why"] or site["status"] not in ("right", "unprojected"):
            yield from causes("; ".join(site["why"]))
    said = any(site["why"] for site in sites)
    for words in record["missing"]:
        is_measure = re.match(r"probe, \w+: (off|\d)|keys are hidden|norm before", words)
        if is_measure or (re.match("LocAteR|audit", words) and not said):
            yield from causes(words)


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """Causes, how many families they keep from being verified, and which."""
    lines = []
    for cause, families in by_cause(records).items():
        lines.append(f"{len(families):4d}  {cause}: {', '.join(families)}")
    return "\n".join(lines)
