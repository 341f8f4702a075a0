"""The audit page shows the audit, head by head, and takes no orders from a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from tests.browser.conftest import HOSTILE, Open

from locater.audit import Audit, HeadRecord


def chart_data(page: Page, name: str) -> list[dict[str, Any]]:
    return list(page.evaluate(f"locater.views['head-{name}'].data('{name}')"))


def cell(page: Page, row: HeadRecord, *, which: int = 0) -> Any:
    label = f"layer {row.layer}, head {row.head}:"
    return page.locator(".map").nth(which).locator(f'td[aria-label^="{label}"]')


def assert_shows(page: Page, audits: list[Audit], row: HeadRecord) -> None:
    """The detail is this head's, to the drawn precision of 1/32767 of the largest value."""
    shown = f"layer {row.layer} head {row.head} ({row.name})"
    assert page.locator("#head-name").text_content() == shown
    found = {name: chart_data(page, name) for name in ("eigenvalues", "singular", "rho")}
    labels = list(dict.fromkeys(point["checkpoint"] for point in found["rho"]))
    assert len(labels) == len(audits)
    for label, audit in zip(labels, audits, strict=True):
        (own,) = [r for r in audit.rows if (r.name, r.head) == (row.name, row.head)]
        mine = {n: [p for p in points if p["checkpoint"] == label] for n, points in found.items()}
        size = max(map(abs, (*own.eigenvalues_real, *own.eigenvalues_imag)))
        for key, truth, scale in (
            (("eigenvalues", "real"), own.eigenvalues_real, size),
            (("eigenvalues", "imaginary"), own.eigenvalues_imag, size),
            (("singular", "value"), own.singular_values, own.singular_values[0]),
            (("rho", "rho"), own.rho, max(own.rho)),
        ):
            drawn = [point[key[1]] for point in mine[key[0]]]
            assert drawn == pytest.approx(list(truth), abs=scale / 32767)
    assert page.locator("#head-verdicts").inner_text().count(row.verdict) == len(audits)


def test_a_click_on_a_head_shows_that_head(
    one_audit_page: Path, audits: list[Audit], open_page: Open
) -> None:
    page = open_page(one_audit_page).page
    assert_shows(page, audits[:1], audits[0].worst_first()[0])
    for row in (audits[0].rows[5], audits[0].rows[-1]):
        cell(page, row).click()
        assert_shows(page, audits[:1], row)
        assert page.locator('td[aria-selected="true"]').count() == 1


def test_a_head_has_an_address_that_survives_a_reload(
    one_audit_page: Path, audits: list[Audit], open_page: Open
) -> None:
    page, row = open_page(one_audit_page).page, audits[0].rows[-1]
    cell(page, row).click()
    assert page.url.endswith(f"#layer-{row.layer}-head-{row.head}")
    page.reload()
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert_shows(page, audits[:1], row)
    other = audits[0].rows[0]
    page.evaluate(f"location.hash = 'layer-{other.layer}-head-{other.head}'")
    page.wait_for_function(
        "name => document.documentElement.dataset.head === name", arg=f"{other.name} {other.head}"
    )
    assert_shows(page, audits[:1], other)


def test_arrows_and_enter_choose_a_head(
    one_audit_page: Path, audits: list[Audit], open_page: Open
) -> None:
    page = open_page(one_audit_page).page
    cell(page, audits[0].rows[0]).click()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "End", "ArrowUp"):
        page.keyboard.press(key)
    by_place = {(row.layer, row.head): row for row in audits[0].rows}
    assert_shows(page, audits[:1], audits[0].rows[0])  # moving alone chooses nothing
    page.keyboard.press("Enter")
    assert_shows(page, audits[:1], by_place[1, 3])
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")  # over the edge: stays
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    assert_shows(page, audits[:1], by_place[0, 0])
    assert page.locator('.map td[tabindex="0"]').count() == 1


def test_a_chosen_column_colors_the_map(
    one_audit_page: Path, audits: list[Audit], open_page: Open
) -> None:
    page = open_page(one_audit_page).page
    page.select_option("#audit-controls select[name=column]", "r")
    low = min(audits[0].rows, key=lambda row: row.r)
    high = max(audits[0].rows, key=lambda row: row.r)
    colors = [
        cell(page, row).evaluate("n => getComputedStyle(n).backgroundColor") for row in (low, high)
    ]
    assert colors[0] != colors[1]
    label = cell(page, high).get_attribute("aria-label")
    assert float(label.split("tr W/λ ")[1]) == pytest.approx(high.r, rel=1e-3)
    for option in page.locator("#audit-controls select[name=column] option").all():
        page.select_option("#audit-controls select[name=column]", option.get_attribute("value"))


def test_two_checkpoints_stand_side_by_side(
    two_audits_page: Path, audits: list[Audit], open_page: Open
) -> None:
    opened = open_page(two_audits_page)
    page = opened.page
    row = audits[0].rows[6]
    cell(page, row, which=1).click()
    assert_shows(page, audits, row)
    assert page.locator('td[aria-selected="true"]').count() == 2
    page.select_option("#audit-controls select[name=column]", "r")
    page.select_option("#audit-controls select[name=mode]", "change")
    label = cell(page, row, which=1).get_attribute("aria-label")
    change = audits[1].rows[6].r - audits[0].rows[6].r
    assert float(label.split("change ")[1]) == pytest.approx(change, rel=2e-3)
    most = max(range(12), key=lambda k: abs(audits[1].rows[k].r - audits[0].rows[k].r))
    first = page.locator("#audit-table button").first
    moved = audits[0].rows[most]
    assert first.inner_text() == f"layer {moved.layer}, head {moved.head}"
    first.click()
    assert_shows(page, audits, moved)
    page.select_option("#audit-controls select[name=column]", "verdict")
    assert opened.errors == []


def test_hostile_names_stay_text(two_audits_page: Path, open_page: Open) -> None:
    opened = open_page(two_audits_page)
    page = opened.page
    page.locator(".map td[data-head]").last.click()
    page.locator(".map td[data-head]").last.hover()
    page.locator("#head-eigenvalues .mark-symbol path").first.hover(force=True)
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0
    assert HOSTILE in str(page.locator("#head-name").text_content())
    assert str(page.locator("#basis").text_content()).count(HOSTILE) >= 6
    assert opened.errors == []
