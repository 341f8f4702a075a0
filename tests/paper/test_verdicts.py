import re

from locater.paper.claims import Verdict, verdict_markdown, verdict_section

HOSTILE = '<script>alert("x")</script>'
VERDICTS = [
    Verdict(where=HOSTILE, claim="a", outcome="differs", found="|1|", section="here"),
    Verdict(where="Eq. 5", claim="b", outcome="reproduced", found="2", section="elsewhere"),
]
SUMMARY = "2 claims: 1 reproduced, 1 came out otherwise."


def test_verdicts_lead_to_the_sections_that_are_there_and_hostile_words_stay_words() -> None:
    html = verdict_section(VERDICTS, {"here", "headline"}).before
    assert re.findall(r'href="#([^"]+)"', html) == ["here"]  # no link that leads nowhere
    assert "<script" not in html and "&lt;script&gt;" in html
    assert SUMMARY in html
    assert html.index("depends on the reading") < html.index("<table")  # the rule stands above


def test_the_table_for_a_document_keeps_its_columns() -> None:
    summary, _, rule, _, head, _, first, second = verdict_markdown(VERDICTS).rstrip().split("\n")
    assert summary == SUMMARY and "both readings" in rule
    assert head == "| where | the paper says | verdict | we find |"
    assert first.endswith("| **differs** | \\|1\\| |")
    assert second == "| Eq. 5 | b | **reproduced** | 2 |"
