import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from locater.errors import LocaterError
from locater.files import write_file
from locater.report import curves, figures
from locater.report.page import Section, render_page
from locater.report.reproduce import PARTS, ReproduceConfig, reproduce
from locater.simulation import preset

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'


class _Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_hostile_words_stay_words() -> None:
    chart = {"mark": "point", "data": {"values": [{"name": HOSTILE}]}, "title": HOSTILE}
    section = Section(key="a", title=HOSTILE, text=HOSTILE, caption=HOSTILE, chart=chart)
    plain = render_page(HOSTILE, [section], intro=HOSTILE, footer=HOSTILE)
    tags = _Tags(plain).tags
    assert not [tag for tag, _ in tags if tag == "img"]
    # the library, our own few lines, and the chart's data
    assert len([tag for tag, _ in tags if tag == "script"]) == 3


def test_page_asks_for_nothing_from_outside() -> None:
    chart = figures.softmax_chart(curves.softmax_curves()).to_dict()
    html = render_page("page", [Section(key="fig1", title="one", chart=chart)])
    outside = [(tag, a) for tag, a in _Tags(html).tags if "src" in a or tag in ("link", "iframe")]
    assert outside == []


def test_reproduce_writes_the_page_with_all_figures_and_errata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        name: replace(panel, draws=2, sequences=20, model=8, tokens=6)
        for name, panel in preset("fig5").items()
    }
    monkeypatch.setattr("locater.report.reproduce.preset", lambda _: small)
    said: list[str] = []
    page = reproduce(ReproduceConfig(out=tmp_path), report=said.append)
    html = page.read_text()
    assert [line.split()[-1] for line in said] == list(PARTS)
    keys = ["fig1", "fig2", "fig3", "fig4", "fig5", "fig5-beyond", "errata"]
    assert re.findall(r'<section id="([^"]+)"', html) == keys
    assert html.count('data-chart="') == 6
    assert len(html) < 5_000_000
    exports = {path.name for path in (tmp_path / "figures").iterdir()}
    assert exports == {f"{key}.{suffix}" for key in keys[:-1] for suffix in ("svg", "png", "pdf")}


def test_only_the_named_parts_are_made(tmp_path: Path) -> None:
    config = ReproduceConfig(out=tmp_path, only="fig4, fig1", exports=False)
    html = reproduce(config).read_text()
    assert re.findall(r'<section id="([^"]+)"', html) == ["fig1", "fig4"]
    assert not (tmp_path / "figures").exists()


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path / "page.html", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(LocaterError, match=r"No space left on device.*\nhint: .*make room"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
