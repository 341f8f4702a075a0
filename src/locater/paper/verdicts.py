"""What became of a claim of the paper, as a record, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from locater.report.page import Section, rendered
from locater.report.tables import Columns, markdown_table

Outcome = Literal[
    "reproduced",
    "differs",
    "depends on the reading",
    "not supported",
    "paper is wrong",
    "undecided",
]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One claim of the paper and what the part of the program that looked into it found.

    `differs` is for what was measured and came out otherwise, `depends on the reading` for what
    the text's weights give and the captions' do not (or the reverse), `not supported` for a cause
    whose evidence is missing, `paper is wrong` for what a counterexample or a proof refutes,
    `undecided` for what the seeds cannot tell.
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


RULE = (
    "A claim about training is “reproduced” where the claimed direction is found (paired t-test "
    "over seeds at 5 %, corrected after Holm) under both readings of the paper, whose text and "
    "captions disagree on which weight is which. It “differs” where the opposite, or no "
    "difference beyond a margin, is found under both. Where the readings disagree it “depends on "
    "the reading”; else it is “undecided”. Every verdict on training holds for the regime in its "
    "line."
)
"""Stands above the table."""
_COUNTED = {
    "reproduced": "reproduced",
    "differs": "came out otherwise",
    "depends on the reading": "that depend on how the paper is read",
    "not supported": "without support",
    "paper is wrong": "on which the paper is wrong",
    "undecided": "undecided",
}


def summary_line(verdicts: Sequence[Verdict]) -> str:
    """How many claims came out how."""
    count = Counter(verdict.outcome for verdict in verdicts)
    parts = [f"{count[name]} {words}" for name, words in _COUNTED.items() if count[name]]  # type: ignore[index]
    return f"{len(verdicts)} claims: {', '.join(parts)}."


def verdict_markdown(verdicts: Sequence[Verdict]) -> str:
    """The table for a page of documentation."""
    columns: Columns = {"where": "where", "the paper says": "claim",
               "verdict": lambda one: f"**{one.outcome}**", "we find": "found"}  # fmt: skip
    return f"{summary_line(verdicts)}\n\n{RULE}\n\n{markdown_table(verdicts, columns)}\n"


def verdict_section(verdicts: Sequence[Verdict], keys: Collection[str]) -> Section:
    """The table for the page, each row with a link to its section where `keys` has that one."""
    table = rendered("verdicts.html", "table", verdicts, summary_line(verdicts), keys, RULE,
                     room="locater.paper")  # fmt: skip
    return Section(key="verdicts", title="Verdicts", before=table)
