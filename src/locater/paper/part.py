"""What a part of the reproduction is given and what it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from locater.report.page import Section
from locater.report.verdicts import Verdict

Scale = Literal["quick", "cpu", "paper"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a part may know and use."""

    scale: Scale
    store: Path
    """A folder for what the part wants to find again after an interruption."""
    data: Path | None = None
    """Where the text lies that models are trained on."""
    results: Path | None = None
    """Published runs, which are not trained again."""
    reality: Path | None = None
    """Published studies of real models."""
    progress: Callable[[int, int], None] = lambda done, total: None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a part made; plain enough for JSON."""

    sections: tuple[Section, ...]
    verdicts: tuple[Verdict, ...] = ()
    headline: Section | None = None
    """The one thing to see first, if this part has it."""
    exports: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Figures for papers beside those of the sections: specifications by name."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` takes back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """Read it back."""
        return cls(
            sections=tuple(Section(**section) for section in data["sections"]),
            verdicts=tuple(Verdict(**verdict) for verdict in data["verdicts"]),
            headline=None if data["headline"] is None else Section(**data["headline"]),
            exports=data["exports"],
        )


@dataclass(frozen=True)
class Part:
    """How a part is made, and about how long it takes on two cores."""

    make: Callable[[Context], Result]
    seconds: Mapping[Scale, float]
    scales: tuple[Scale, ...] = ("quick", "cpu", "paper")
    """Where it is made unless only other parts are asked for."""
