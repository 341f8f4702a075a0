"""What became of a claim of the paper, as a record, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Outcome = Literal["reproduced", "differs", "paper is wrong", "undecided"]
_SIGNS = {  # a sign and a word: color alone says nothing to some readers
    "reproduced": ("✓", "reproduced"),
    "differs": ("≠", "differs"),
    "paper is wrong": ("✗", "wrong"),
    "undecided": ("?", "open"),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One claim of the paper and what the part of the program that looked into it found.

    `differs` is for what was measured and came out otherwise, `paper is wrong` for what a
    counterexample or a proof refutes, `undecided` for what one seed cannot tell.
    """

    where: str
    """In the paper: "Fig. 2", "Lemma 2.3"."""
    claim: str
    """What the paper says there."""
    outcome: Outcome
    found: str
    """What was computed, with the number that decides."""
    section: str
    """Key of the section of the page that shows it."""


def summary_line(verdicts: Sequence[Verdict]) -> str:
    """How many claims came out how."""
    count = Counter(verdict.outcome for verdict in verdicts)
    rest = f", {count['undecided']} undecided" if count["undecided"] else ""
    return (
        f"{len(verdicts)} claims: {count['reproduced']} reproduced, {count['differs']} came out "
        f"otherwise, {count['paper is wrong']} on which the paper is wrong{rest}."
    )


def verdict_markdown(verdicts: Sequence[Verdict]) -> str:
    """The table for a page of documentation."""
    rows = [
        ("where", "the paper says", "verdict", "we find"),
        ("---",) * 4,
        *((v.where, v.claim, f"**{v.outcome}**", v.found) for v in verdicts),
    ]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return f"{summary_line(verdicts)}\n\n" + "\n".join(lines) + "\n"


def verdict_table(verdicts: Sequence[Verdict], sections: Collection[str]) -> str:
    """HTML of the table, each row with a link to its section where the page has that one."""
    if not verdicts:
        return ""
    heads = "".join(
        f'<th scope="col" role="columnheader">{name}</th>'
        for name in ("where", "the paper says", "verdict", "we find")
    )
    return (
        '<section id="verdicts"><h2>Verdicts</h2><div class="table">'
        f'<table class="verdicts" role="table"><caption>{summary_line(verdicts)} '
        "Every verdict was computed by the run behind this page.</caption>"
        f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead><tbody role="rowgroup">'
        + "".join(_row(verdict, sections) for verdict in verdicts)
        + "</tbody></table></div></section>"
    )


def _row(verdict: Verdict, sections: Collection[str]) -> str:
    sign, style = _SIGNS[verdict.outcome]
    where = escape(verdict.where)
    if verdict.section in sections:
        where = f'<a href="#{escape(verdict.section)}">{where}</a>'
    return (
        f'<tr role="row"><th scope="row" role="rowheader">{where}</th>'
        f'<td role="cell">{escape(verdict.claim)}</td>'
        f'<td role="cell" class="outcome {style}"><span aria-hidden="true">{sign}</span> '
        f'{escape(verdict.outcome)}</td><td role="cell">{escape(verdict.found)}</td></tr>'
    )
