"""What became of a claim of the paper, as a record, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from locater.report.page import Section, rendered
from locater.report.tables import Columns, markdown_table

Outcome = Literal["reproduced", "differs", "paper is wrong", "undecided"]


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
    columns: Columns = {"where": "where", "the paper says": "claim",
               "verdict": lambda one: f"**{one.outcome}**", "we find": "found"}  # fmt: skip
    return f"{summary_line(verdicts)}\n\n{markdown_table(verdicts, columns)}\n"


def verdict_section(verdicts: Sequence[Verdict], keys: Collection[str]) -> Section:
    """The table for the page, each row with a link to its section where `keys` has that one."""
    table = rendered("verdicts.html", "table", verdicts, summary_line(verdicts), keys,
                     room="locater.paper")  # fmt: skip
    return Section(key="verdicts", title="Verdicts", before=table)
