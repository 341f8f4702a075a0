"""What is true of every page: it opens, asks for nothing, and can be read by everybody."""

import itertools
from pathlib import Path

import pytest
from tests.browser.conftest import Open, Opened

PAGES = ("figures_page", "one_audit_page", "two_audits_page")


@pytest.fixture(scope="module", params=PAGES)
def path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def opened(path: Path, open_page: Open) -> Opened:
    """One view of each page for the tests that leave it as it was."""
    return open_page(path)


def test_a_page_opens_in_silence_and_asks_for_nothing(opened: Opened) -> None:
    assert opened.errors == []
    assert opened.outside == []
    boxes = opened.page.locator(".chart")
    assert boxes.count() == opened.page.locator('.chart[data-drawn="yes"] svg.marks').count() > 0


def test_a_request_that_leaves_the_page_would_be_seen(
    one_audit_page: Path, open_page: Open
) -> None:
    opened = open_page(one_audit_page)
    # what the page's own policy forbids does not even reach the guard
    opened.page.evaluate("fetch('https://example.org/').catch(() => 0)")
    opened.page.wait_for_function("performance.now() > 0")
    assert any("Content Security Policy" in error for error in opened.errors)
    assert opened.outside == []


def test_a_script_that_is_not_the_page_s_own_does_not_run(path: Path, open_page: Open) -> None:
    opened = open_page(path)
    opened.page.evaluate(
        """() => { const made = document.createElement('script');
        made.textContent = 'window.harmed = 1'; document.body.append(made) }"""
    )
    assert opened.page.evaluate("window.harmed") is None
    assert any("Content Security Policy" in error for error in opened.errors)


def test_a_phone_needs_no_sideways_scrolling(path: Path, open_page: Open) -> None:
    opened = open_page(path, width=390, scheme="dark")
    widths = opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths == [390, 390]
    assert opened.errors == []
    # nor does a figure, but for the grid of Fig. 2: panels stand below each other, titles break
    wide = opened.page.locator(".chart").evaluate_all(
        "all => all.filter(n => n.scrollWidth > n.clientWidth + 1).map(n => n.id)"
    )
    assert set(wide) <= {"fig2-chart"}


def test_a_phone_gets_a_long_page_as_its_headings(figures_page: Path, open_page: Open) -> None:
    page = open_page(figures_page, width=390).page
    assert page.evaluate("document.documentElement.scrollHeight") < 15_000
    assert not page.locator("#fig5-chart svg").count()  # drawn when it is opened
    page.evaluate("location.hash = 'fig5'")
    page.wait_for_selector("#fig5-chart svg.marks")
    assert page.locator("#fig5 > details").evaluate("n => n.open")
    wide = page.locator("#errata .table").first
    page.evaluate("location.hash = 'errata'")
    page.wait_for_function("document.querySelector('#errata .hint.shown')")
    assert wide.evaluate("n => n.scrollWidth > n.clientWidth")


def test_charts_are_as_wide_as_their_column(figures_page: Path, open_page: Open) -> None:
    page = open_page(figures_page, width=1400).page
    shares = page.locator("main .chart").evaluate_all(
        "all => all.filter(n => !n.closest('.detail')).map(n => [n.id,"
        " n.querySelector('svg.marks').getBoundingClientRect().width / n.clientWidth])"
    )
    assert len(shares) > 5
    # of Fig. 2 two small panels are made here, for seven
    assert not [n for n, share in shares if not 0.75 < share <= 1 and n != "fig2-chart"]


def test_tables_sort_and_filter(figures_page: Path, open_page: Open) -> None:
    page = open_page(figures_page, width=1400).page
    rows = page.locator(".verdicts tbody tr")
    every = rows.count()
    outcomes = page.locator("#verdicts .filters select option").all_text_contents()[1:]
    for outcome in outcomes:
        page.locator("#verdicts .filters select").select_option(outcome)
        shown = page.locator(".verdicts tbody tr:visible td.outcome").all_text_contents()
        assert 0 < len(shown) < every
        assert {" ".join(one.split()) for one in shown} == {outcome}
    page.locator("#verdicts .filters select").select_option("all")
    page.locator("#verdicts .filters input").fill("Lemma 2")
    assert {"Lemma 2" in text for text in rows.filter(visible=True).all_text_contents()} == {True}
    page.locator("#verdicts .filters input").fill("")
    theta = page.locator("#fig6 table")
    column = theta.locator("thead th").all_text_contents().index("tr W")

    def numbers() -> list[float]:
        cells = theta.locator(f"tbody tr td:nth-child({column + 1})").all_text_contents()
        return [float(cell.split(" ")[0]) for cell in cells]

    for order in (True, False):
        theta.locator("thead button.sort").nth(column).click()
        assert numbers() == sorted(numbers(), reverse=order)


def test_dark_mode_turns_paper_and_charts(opened: Opened) -> None:
    page = opened.page
    label = ".chart svg .role-axis-label text"

    def brightness(selector: str, kind: str) -> float:
        color = page.locator(selector).first.evaluate(f"n => getComputedStyle(n).{kind}")
        red, green, blue = (float(x) for x in color.strip("rgba()").split(",")[:3])
        return (red + green + blue) / (3 * 255)

    assert brightness("body", "backgroundColor") > 0.9
    assert brightness(label, "fill") < 0.2
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        f"getComputedStyle(document.querySelector('{label}')).fill !== 'rgb(27, 27, 27)'"
    )
    assert brightness("body", "backgroundColor") < 0.2
    assert brightness(label, "fill") > 0.8
    page.emulate_media(color_scheme="light")


def test_every_chart_has_words_and_every_page_its_landmarks(opened: Opened) -> None:
    page = opened.page
    labels = page.locator(".chart").evaluate_all("all => all.map(n => n.ariaLabel)")
    assert all(len(label) > 20 for label in labels)
    assert page.locator("h1").count() == 1
    levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(n => +n.tagName[1])")
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(levels))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    for control in page.locator("input, select").all():
        assert control.evaluate("n => n.labels.length") == 1


def test_links_of_the_verdicts_lead_to_their_sections(figures_page: Path, open_page: Open) -> None:
    page = open_page(figures_page).page
    targets = page.locator(".verdicts a").evaluate_all("all => all.map(n => n.hash)")
    assert len(targets) > 10
    assert all(page.locator(target).count() == 1 for target in targets)
