"""Every page that a command writes, of things whose names attack a page: they stay text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page, Route
from safetensors.torch import load_file, save_file
from tests.browser.conftest import browser as browser

from locater import cli

pytestmark = pytest.mark.drill
NAMES = (
    "<img src=x onerror='alert(1);window.harmed=1'>",
    "\"'><svg onload=alert(1)><!--",
    "](javascript:alert(1)) ![x](https:example.org) <b>",
    "{{7*7}}${alert(1)}<%=1%>\u2028`</`\\",
)
HARM = (
    "</script><script>alert(1);window.harmed=1</script><img src=//example.org/x onerror=alert(1)>"
)


def hostile_model(model: Path, place: Path) -> Path:
    """A copy whose own name, tensors and settings are attacks."""
    shutil.copytree(model, place)
    config = json.loads((place / "config.json").read_text())
    for name in ("architectures", "_name_or_path", "transformers_version"):
        config[name] = [HARM] if name == "architectures" else HARM
    (place / "config.json").write_text(json.dumps(config))
    return place


def hostile_tensors(model: Path, place: Path) -> Path:
    """The weights alone, in a file whose every tensor has a name that attacks."""
    tensors = load_file(model / "model.safetensors")
    place.parent.mkdir(parents=True, exist_ok=True)
    renamed = {f"{HARM}.{name}": value.contiguous() for name, value in tensors.items()}
    save_file({name: value.to(torch.float32) for name, value in renamed.items()}, place)
    return place


def hostile_run(place: Path) -> Path:
    """A run whose corpus and metrics are attacks."""
    assert cli.main(["train", "--preset", "tiny", "--steps", "4", "--out", str(place)]) == 0
    for name in ("config.json", "environment.json"):
        data = json.loads((place / name).read_text())
        data["corpus"] = HARM if name == "config.json" else {HARM: HARM}
        (place / name).write_text(json.dumps(data))
    records = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**record, HARM: HARM, "layer": HARM}) for record in records]
    (place / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return place


def hostile_studies(place: Path) -> Path:
    """Published studies of models with names that attack."""
    place.mkdir()
    for path in (Path(__file__).parents[2] / "results/reality").glob("[ms]*.json"):
        data = json.loads(path.read_text())
        (place / path.name).write_text(json.dumps({**data, "model": HARM}))
    return place


@pytest.fixture(scope="module")
def pages(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of every command that writes one."""
    here, text = tmp_path_factory.mktemp("hostile"), str(samples / "text.txt")
    models = [hostile_model(samples / "model", here / name) for name in NAMES]
    weights = hostile_tensors(samples / "model", here / "weights" / "named.safetensors")
    sizes = ["--text", text, "--tokens", "16", "--blocks", "60"]
    stored = here / f"{NAMES[0]}.json"
    run = hostile_run(here / f"run {NAMES[3]}")
    commands = {
        "audit": ["audit", str(models[0]), "--tokens", "16"],
        "timeline": ["audit", *map(str, models), "--tokens", "16"],
        "tensors": ["audit", str(weights), "--heads", "4", "--tokens", "16"],
        "probe": ["probe", str(models[1]), *sizes],
        "reality": ["explain", str(models[2]), *sizes],
        "what-if": ["what-if", str(models[1]), "--text", text, "--from-tokens", "16", "--blocks",
                    "40", "--tokens", "24", "--draws", "20"],
        "theories": ["theories", str(models[0]), *sizes, "--draws", "20"],
        "report": ["report", str(run), str(stored), str(models[3])],
        "reproduce": ["reproduce", "--only", "fig1,published", "--no-exports",
                      "--reality", str(hostile_studies(here / "studies"))],
    }  # fmt: skip
    from locater.audit import audit_checkpoint

    stored.write_text(audit_checkpoint(str(models[2]), tokens=16).to_json())
    made = {}
    for name, command in commands.items():
        made[name] = here / ("out/index.html" if name == "reproduce" else f"{name}.html")
        out = made[name].parent if name == "reproduce" else made[name]
        assert cli.main([*command, "--out", str(out)]) == 0, name
    return made


def watched(browser: Browser, path: Path) -> tuple[Page, list[str]]:
    """The page, and everything that must not happen."""
    happened: list[str] = []
    page = browser.new_page()
    page.on(
        "dialog", lambda dialog: (happened.append(f"dialog {dialog.message}"), dialog.dismiss())
    )
    page.on("pageerror", lambda error: happened.append(f"error {error}"))

    def guard(route: Route) -> None:  # what the policy forbids does not come here
        if route.request.url.startswith((path.as_uri(), "data:", "blob:")):
            route.continue_()
        else:
            happened.append(f"request {route.request.url}")
            route.abort()

    page.route("**/*", guard)
    page.on(
        "console",
        lambda said: happened.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    return page, happened


@pytest.mark.parametrize(
    "name",
    [
        "audit",
        "timeline",
        "tensors",
        "probe",
        "reality",
        "what-if",
        "theories",
        "report",
        "reproduce",
    ],
)
def test_names_stay_text(name: str, pages: dict[str, Path], browser: Browser) -> None:
    page, happened = watched(browser, pages[name])
    for selector in (".map td[data-head]", ".chart svg path", "details summary", "button", "th"):
        for place in page.locator(selector).all()[:6]:
            if place.is_visible():
                place.hover(force=True)
                place.click(force=True)
    page.wait_for_timeout(300)
    assert happened == []
    assert page.evaluate("window.harmed") is None
    assert page.locator("img, iframe, object, embed").count() == 0
    assert page.locator("[onerror], [onload], [onclick]").count() == 0
    links = page.locator("a").evaluate_all("all => all.map(a => a.href)")
    assert not [one for one in links if one.startswith("javascript:")]
    assert "onerror" in page.content()  # the attack is there, as text
    # and if a name did get in, the policy would hold
    page.evaluate(
        """() => { const made = document.createElement('script');
        made.textContent = 'window.harmed = 2'; document.body.append(made);
        const image = new Image(); image.src = 'https://example.org/x.png';
        document.body.append(image); return fetch('https://example.org/').catch(() => 0) }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.harmed") is None
    assert not [one for one in happened if one.startswith(("request", "dialog"))]
    assert any("Content Security Policy" in one for one in happened)
    page.close()
