"""Records to one self-contained HTML file that works offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markdown_it import MarkdownIt

from locater.errors import MissingExtraError

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --muted: #767676; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
figure { margin: 1rem 0; } figcaption { color: var(--muted); max-width: 46rem; }
.chart, .table { overflow-x: auto; }
.chart { background: #fff; border-radius: 6px; padding: .5rem; }
table { border-collapse: collapse; font-size: .92rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left;
  vertical-align: top; }
nav a { margin-right: 1rem; } footer { margin-top: 3rem; color: var(--muted); font-size: .85rem; }
code { font-size: .9em; }
"""
_SCRIPT = """
for (const node of document.querySelectorAll("script[data-chart]")) {
  const box = document.getElementById(node.dataset.chart);
  vegaEmbed(box, JSON.parse(node.textContent), {actions: {export: true, source: false,
    compiled: false, editor: false}, renderer: "svg"})
    .then(() => { box.dataset.drawn = "yes"; })
    .catch(error => { box.textContent = "This figure could not be drawn: " + error; });
}
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page: a heading, perhaps a chart, and words."""

    key: str
    """Anchor and element id: letters, digits and dashes."""
    title: str
    text: str = ""
    """Markdown; raw HTML in it is shown as text."""
    chart: dict[str, Any] | None = None
    """A Vega-Lite specification."""
    caption: str = ""


def render_page(
    title: str, sections: Sequence[Section], *, intro: str = "", footer: str = ""
) -> str:
    """Make the HTML text; every string is escaped, nothing is fetched when it is read."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")

    def words(text: str) -> str:
        html = markdown.render(text)
        return html.replace("<table>", '<div class="table"><table>').replace(
            "</table>", "</table></div>"
        )

    parts = [
        f'<section id="{escape(section.key)}"><h2>{escape(section.title)}</h2>'
        + _figure(section)
        + words(section.text)
        + "</section>"
        for section in sections
    ]
    links = "".join(f'<a href="#{escape(s.key)}">{escape(s.title)}</a>' for s in sections)
    scripts = ""
    if any(section.chart for section in sections):
        scripts = f"<script>{_vega()}</script><script>{_SCRIPT}</script>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<main><h1>{escape(title)}</h1>{words(intro)}<nav>{links}</nav>{''.join(parts)}</main>"
        f"<footer>{words(footer)}</footer>{scripts}</body></html>\n"
    )


def _figure(section: Section) -> str:
    if section.chart is None:
        return ""
    # "</script>" inside a string of the specification must not end the script element
    spec = json.dumps(section.chart, ensure_ascii=False).replace("<", "\\u003c")
    chart = f"{escape(section.key)}-chart"
    return (
        f'<figure><div class="chart" id="{chart}"></div>'
        f"<figcaption>{escape(section.caption)}</figcaption></figure>"
        f'<script type="application/json" data-chart="{chart}">{spec}</script>'
    )


def _vega() -> str:
    try:
        import vl_convert
    except ImportError as error:  # pragma: no cover - the dev environment has it
        raise MissingExtraError("vl-convert-python", extra="report") from error
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script")
