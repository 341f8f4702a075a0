"""What a sweep over every model type of transformers found: which forms are the model's own.

`coverage.json` beside this module is written by `python -m tests.coverage.sweep --publish`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

Status = Literal["verified", "partly", "wrong", "skipped"]


@dataclass(frozen=True)
class Known:
    """What is known of one model type."""

    model_type: str
    status: Status | None
    """`verified`: every attention's form gives the logits that enter the model's own softmax, live
    and from file.  `partly`: what `missing` names is left out, and the layouts' caveats say so.
    `wrong`: some form does not give the model's logits.  `skipped`: no attention of it is read.
    None: no tiny model of this type was put to the test, or it has no softmax attention."""
    gap: float | None = None
    """The largest difference, in standard deviations of the logits, live or from file."""
    missing: tuple[str, ...] = ()
    """What is left out or wrong, in words."""
    transformers: str = ""
    """The version that the type was tested with."""

    @property
    def sentence(self) -> str:
        """One sentence for a report's head."""
        why = "; ".join(self.missing)
        tested = f"transformers {self.transformers}"
        if self.status == "verified":
            gap = "" if self.gap is None else f" (largest gap {self.gap:.0e} standard deviations)"
            return f"verified: {self.model_type} gives the model's own logits in {tested}{gap}"
        if self.status == "partly":
            return f"partly verified in {tested}: {why}"
        if self.status == "wrong":
            return f"known gap, found in {tested}: {why}"
        if self.status == "skipped":
            return f"not read: {why}"
        return f"unverified: {why or 'names only; no model of this type was put to the test'}"


@cache
def _table(name: str = "coverage.json") -> dict[str, Any]:
    text = resources.files("locater.models").joinpath(name).read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def defaults(model_type: object) -> dict[str, Any]:
    """What transformers assumes where a config of this type is silent.

    `own` holds settings of attention, `names` other spellings, `parts` the types of its parts.

    >>> defaults("clip_text_model")["own"]["num_attention_heads"]
    8
    """
    assumed: dict[str, Any] = _table("defaults.json").get(str(model_type), {})
    return assumed


def known(model_type: str | None) -> Known:
    """What is known of a config's `model_type` (also of a part: `siglip_vision_model`).

    >>> known("llama").status, known("mine").status
    ('verified', None)
    >>> known("mine").sentence
    'unverified: names only; no model of this type was put to the test'
    """
    table = _table()
    found = table["types"].get(model_type)
    if found is None:
        return Known(str(model_type or ""), None)
    return Known(
        str(model_type),
        found["status"],
        found.get("gap"),
        tuple(found.get("missing", ())),
        table["transformers"],
    )


def every() -> list[Known]:
    """All model types that were put to the test, by name."""
    return [known(name) for name in _table()["types"]]
