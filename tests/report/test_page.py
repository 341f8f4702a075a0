import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

from locater.errors import LocaterError
from locater.files import write_file
from locater.paper import curves, figures
from locater.report.page import Section, render_page, script_json

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
    # the chart's data, the library, our own lines, and the call that draws
    assert len([tag for tag, _ in tags if tag == "script"]) == 4


def test_page_asks_for_nothing_from_outside() -> None:
    chart = figures.softmax_chart(curves.softmax_curves()).to_dict()
    html = render_page("page", [Section(key="fig1", title="one", chart=chart)])
    asking = [(tag, a) for tag, a in _Tags(html).tags if "src" in a or tag in ("link", "iframe")]
    assert [(tag, a["href"][:10]) for tag, a in asking] == [("link", "data:image")]  # its icon


def test_json_in_a_script_cannot_end_it() -> None:
    data = {"name": "</script><!-- & \u2028 \u2029 <script>"}
    text = script_json(data)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == data


def test_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        script_json({"rho": float("nan")})


def test_every_chart_says_what_it_shows() -> None:
    chart = {"hconcat": [{"description": "left one"}, {"description": "right one"}], "data": {}}
    html = render_page("page", [Section(key="two", title="Two", chart=chart)])
    labels = [a.get("aria-label") for tag, a in _Tags(html).tags if a.get("role") == "group"]
    assert labels == ["left one right one"]


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o077)
    try:
        path = write_file(tmp_path / "page.html", "old")
        assert path.stat().st_mode & 0o777 == 0o600  # as the user wishes new files to be
        os.umask(0o002)
        assert write_file(path, "old").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(LocaterError, match=r"No space left on device.*\nhint: .*make room"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]
