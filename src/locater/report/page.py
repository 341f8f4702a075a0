"""Records to one self-contained HTML file that works offline."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from locater.errors import needing

with needing("one of jinja2, markdown-it-py and vl-convert-python", extra="report"):
    import vl_convert
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markdown_it import MarkdownIt


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
    """HTML of a template of ours, ahead of the chart."""
    after: str = ""
    """The same, behind the chart."""
    script: str = ""
    """JavaScript of our own, run once after the page is there."""
    group: str = ""
    """Heading of the contents that it stands under."""
    folded: str = ""
    """Markdown for who wants it: settings, caveats; a click shows it."""
    is_folded: bool = False
    """Whether all of it waits for a click."""


def render_page(
    title: str, sections: Sequence[Section], *, intro: str = "", opening: str = "", footer: str = ""
) -> str:
    """Make the HTML text; every string is escaped, nothing is fetched when it is read.

    `opening` is HTML of a template of ours, what a reader sees first, below the intro.
    """
    scripts = [asset("page.js"), *(section.script for section in sections if section.script)]
    if any(section.chart or section.script for section in sections):
        bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]
        scripts = [bundle.replace("</script", "<\\/script"), *scripts]
    scripts.append("locater.start();")
    groups: dict[str, list[Section]] = {}
    for section in sections:
        groups.setdefault(section.group, []).append(section)
    return _templates("locater.report").get_template("page.html").render(
        title=title,
        sections=sections,
        groups=groups,
        intro=intro,
        opening=opening,
        footer=footer,
        policy=_policy(scripts),
        style=asset("page.css"),
        scripts=scripts,
    )  # fmt: skip


def _policy(scripts: Sequence[str]) -> str:
    """The page could fetch nothing if it wanted to, and runs its own scripts alone.

    Vega compiles its expressions, hence unsafe-eval.
    """
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    own = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {own} 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def rendered(template: str, part: str, *values: Any, room: str = "locater.report") -> str:
    """HTML of a part (a macro) of one of our templates; the values in it are escaped."""
    return str(getattr(_templates(room).get_template(template).module, part)(*values)).strip()


def asset(name: str, *, room: str = "locater.report") -> str:
    """The text of one of our own style sheets and scripts."""
    return (files(room) / "assets" / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in, nor open another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


@cache
def _templates(room: str) -> Environment:
    environment = Environment(
        loader=PackageLoader(room),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "markdown": _markdown,
        "json": script_json,
        "plain": lambda text: re.sub(r"[*`\[\]]|\(#.*?\)", "", text).strip(),
        "described": lambda spec: " ".join(dict.fromkeys(_descriptions(spec))),
    }
    return environment


def _markdown(text: str) -> str:
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    for level in (4, 3, 2):  # a section's own heading stands above those of its text
        html = re.sub(rf"(</?h){level}>", rf"\g<1>{level + 1}>", html)
    html = html.replace("<table>", '<div class="table" tabindex="0"><table>')
    return html.replace("</table>", "</table></div>")


def _descriptions(spec: Any) -> Iterator[str]:
    """What a chart says about itself and its panels."""
    parts = spec if isinstance(spec, list) else []
    if isinstance(spec, dict):
        if isinstance(spec.get("description"), str):
            yield spec["description"]
        parts = [value for key, value in spec.items() if key not in ("data", "datasets")]
    for value in parts:
        yield from _descriptions(value)
