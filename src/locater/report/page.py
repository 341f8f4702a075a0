"""Records to one self-contained HTML file that works offline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from markdown_it import MarkdownIt

from locater.errors import MissingExtraError
from locater.report.verdicts import Verdict, summary_line, verdict_table

# the page could not fetch anything if it wanted to; Vega compiles its expressions
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page: a heading, perhaps a chart, and words."""

    key: str
    """Anchor and element id: letters, digits and dashes."""
    title: str
    text: str = ""
    """Markdown; raw HTML in it is shown as text."""
    chart: dict[str, Any] | None = None
    """A Vega-Lite or Vega specification."""
    caption: str = ""
    before: str = ""
    """HTML of our own (never a reader's words) ahead of the chart."""
    after: str = ""
    """The same, behind the chart."""
    script: str = ""
    """JavaScript of our own, run once after the page is there."""


def render_page(
    title: str,
    sections: Sequence[Section],
    *,
    intro: str = "",
    footer: str = "",
    verdicts: Sequence[Verdict] = (),
    headline: Section | None = None,
) -> str:
    """Make the HTML text; every string is escaped, nothing is fetched when it is read.

    How the verdicts came out stands at the top, then the headline, the verdicts, the sections.
    """
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")

    def words(text: str) -> str:
        html = markdown.render(text)
        for level in (4, 3, 2):  # a section's own heading stands above those of its text
            html = re.sub(rf"(</?h){level}>", rf"\g<1>{level + 1}>", html)
        return html.replace("<table>", '<div class="table" tabindex="0"><table>').replace(
            "</table>", "</table></div>"
        )

    def whole(section: Section) -> str:
        return (
            f'<section id="{escape(section.key)}"><h2>{escape(section.title)}</h2>'
            f"{section.before}{_figure(section)}{section.after}{words(section.text)}</section>"
        )

    everything = [*([headline] if headline else []), *sections]
    verdict = verdict_table(verdicts, {section.key for section in everything})
    links = [(section.key, section.title) for section in everything]
    if verdicts:
        links.insert(1 if headline else 0, ("verdicts", "Verdicts"))
        intro = f"{intro}\n\n**{summary_line(verdicts)}** [Each with its number](#verdicts)."
    items = "".join(f'<li><a href="#{escape(k)}">{escape(name)}</a></li>' for k, name in links)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{asset('page.css')}</style></head><body>"
        '<a class="skip" href="#content">Skip to the content</a>'
        f"<header><h1>{escape(title)}</h1>{words(intro)}</header>"
        f'<nav aria-label="Sections"><ul>{items}</ul></nav><main id="content" tabindex="-1">'
        f"{whole(headline) if headline else ''}{verdict}{''.join(map(whole, sections))}</main>"
        f"<footer>{words(footer)}</footer>"
        f"{_scripts(everything)}</body></html>\n"
    )


def asset(name: str, *, room: str = "locater.report") -> str:
    """The text of one of our own style sheets and scripts."""
    return (files(room) / "assets" / name).read_text(encoding="utf-8")


def plain_markdown(value: object) -> str:
    """Text that Markdown shows as it is, on one line."""
    words = " ".join(str(value).split())
    return "".join(f"\\{letter}" if letter in "|_*~`<>[]\\" else letter for letter in words)


def script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in, nor open another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def descriptions(spec: Any) -> Iterator[str]:
    """What a chart says about itself and its panels."""
    if isinstance(spec, dict):
        if isinstance(spec.get("description"), str):
            yield spec["description"]
        for key, value in spec.items():
            if key not in ("data", "datasets"):
                yield from descriptions(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from descriptions(value)


def chart_box(key: str, spec: dict[str, Any]) -> str:
    """HTML of the place where a chart is drawn, and the chart's specification."""
    label = escape(" ".join(dict.fromkeys(descriptions(spec))) or key)
    return (
        f'<div class="chart" id="{escape(key)}" role="group" aria-label="{label}"></div>'
        f'<script type="application/json" data-chart="{escape(key)}">{script_json(spec)}</script>'
    )


def _figure(section: Section) -> str:
    if section.chart is None:
        return ""
    box = chart_box(f"{section.key}-chart", section.chart)
    return f"<figure>{box}<figcaption>{escape(section.caption)}</figcaption></figure>"


def _scripts(sections: Sequence[Section]) -> str:
    own = [section.script for section in sections if section.script]
    if not own and not any(section.chart for section in sections):
        return ""
    parts = [_vega(), asset("page.js"), *own, "locater.drawAll();"]
    return "".join(f"<script>{part}</script>" for part in parts)


def _vega() -> str:
    try:
        import vl_convert
    except ImportError as error:  # pragma: no cover - the dev environment has it
        raise MissingExtraError("vl-convert-python", extra="report") from error
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script")
