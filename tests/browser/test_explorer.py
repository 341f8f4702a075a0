"""The explorer draws the library's numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page
from tests.browser.conftest import Open

from locater import QKForm, TokenProcess, classify, propagation, rho_limit


def set_to(page: Page, **values: Any) -> None:
    page.evaluate(
        """values => {
          const controls = document.getElementById("explorer-controls");
          for (const [name, value] of Object.entries(values)) {
            controls.elements.namedItem(name).value = value;
          }
          controls.dataset.shown = "";
          controls.dispatchEvent(new Event("input"));
        }""",
        values,
    )
    page.wait_for_function('document.getElementById("explorer-controls").dataset.shown')


def settings(page: Page) -> dict[str, Any]:
    text = page.locator("#explorer-controls").get_attribute("data-shown")
    assert text
    return dict(json.loads(text))


def data(page: Page, name: str) -> list[dict[str, Any]]:
    return list(page.evaluate(f"locater.views['explorer-chart'].data('{name}')"))


def process_of(now: dict[str, Any]) -> TokenProcess:
    if now["process"] == "autoregressive":
        return TokenProcess.autoregressive(now["tokens"], now["neighbors"])
    is_walk = now["process"] == "random-walk"
    return (TokenProcess.random_walk if is_walk else TokenProcess.independent)(now["tokens"])


def test_sliders_move_curves_that_are_the_library_s(figures_page: Path, open_page: Open) -> None:
    page = open_page(figures_page).page
    seen = set()
    for values in (
        {"xi": 10, "eta": 0, "tokens": 64, "process": "random-walk"},
        {"xi": -7.3, "eta": -0.4, "tokens": 37},
        {"xi": 0, "eta": 0.7, "tokens": 2},
        {"xi": 3, "eta": -3, "tokens": 512},
        {"xi": 12, "eta": 0.2, "tokens": 100, "process": "autoregressive", "neighbors": 0.9},
        {"neighbors": -0.5, "tokens": 33},
        {"process": "independent", "eta": 1},
    ):
        set_to(page, **values)
        now = settings(page)
        form = QKForm.from_xi_eta(now["xi"], now["eta"], dim=256)
        process = process_of(now)
        rows = data(page, "tokens_rho")
        theta = torch.tensor([row["theta"] for row in rows], dtype=torch.float64)
        limits = {"xi": now["xi"], "eta": now["eta"]}
        expected = {
            "rho": propagation(form, process, method="gaussian").rho,
            "printed": rho_limit(theta, **limits, lemma1="as_printed"),
            "corrected": rho_limit(theta, **limits),
        }
        for name, truth in expected.items():
            drawn = torch.tensor([row[name] for row in rows], dtype=torch.float64)
            # both sides subtract two probabilities, good to some units of 1e-16 each
            torch.testing.assert_close(drawn, truth, rtol=0, atol=1e-11)
        regime = classify(form, process, method="gaussian")
        (found,) = data(page, "regime")
        assert (found["name"], found["count"], found["first"], found["last"]) == (
            regime.name,
            regime.count.item(),
            regime.first.item(),
            regime.last.item(),
        )
        assert page.locator("#explorer-regime").inner_text() == regime.name
        seen.add(regime.name)
        for cells in page.locator("#explorer-values tr").all():
            place, _, printed, corrected, rho = cells.locator("td").all_inner_texts()
            row = int(place) - 1
            for text, name in ((printed, "printed"), (corrected, "corrected"), (rho, "rho")):
                assert float(text) == pytest.approx(expected[name][row].item(), abs=5.1e-5)
    assert len(seen) >= 4


def test_lines_are_drawn_where_the_data_are(figures_page: Path, open_page: Open) -> None:
    page = open_page(figures_page).page
    curves = data(page, "curves")
    assert {row["curve"] for row in curves} == {
        "as printed",
        "corrected, T → ∞",
        "Gaussian, exact moments at T",
    }
    paths = "#explorer-chart svg .mark-line path"
    before = [path.get_attribute("d") for path in page.locator(paths).all()]
    set_to(page, xi=4)
    after = [path.get_attribute("d") for path in page.locator(paths).all()]
    assert len(before) == len(after) == 3
    assert not set(before) & set(after)


def test_arrow_keys_move_a_slider_and_its_curve(figures_page: Path, open_page: Open) -> None:
    page = open_page(figures_page).page
    slider = page.locator("#explorer-controls input[name=xi]")
    slider.focus()
    before = data(page, "regime")[0]["peak"]
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        'JSON.parse(document.getElementById("explorer-controls").dataset.shown).xi === 9.5'
    )
    assert slider.get_attribute("aria-valuetext") == "9.5"
    assert data(page, "regime")[0]["peak"] != before


def test_a_change_of_colors_keeps_the_sliders(figures_page: Path, open_page: Open) -> None:
    page = open_page(figures_page).page
    set_to(page, xi=-3, tokens=20)
    before = data(page, "tokens_rho")
    page.evaluate("delete document.getElementById('explorer-chart').dataset.drawn")
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("#explorer-chart[data-drawn=yes]", state="attached")
    page.wait_for_function("locater.views['explorer-chart'].signal('xi') === -3")
    assert data(page, "tokens_rho") == before
