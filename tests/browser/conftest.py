"""One Chromium for all browser tests; every page records what goes wrong and what it asks for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, Route, sync_playwright
from tests.paper.whole_page import make_whole_page
from torch import nn

from locater.audit import Audit, audit_model
from locater.models.layout import Skipped
from locater.report.audit_view import audit_page

HOSTILE = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>&\u2028"


@dataclass
class Opened:
    """A page in the browser, the errors it raised and the addresses it asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = os.environ.get("LOCATER_CHROMIUM") or shutil.which("chromium")
    if not found:
        pytest.skip(
            "no Chromium: `apt-get install chromium` (Debian), or name one in LOCATER_CHROMIUM"
        )
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_page(browser: Browser) -> Iterator[Open]:
    contexts = []

    def open_page(path: Path, *, width: int = 1200, scheme: Any = "light") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        contexts.append(context)
        opened = Opened(context.new_page())

        def guard(route: Route) -> None:
            if route.request.url.startswith(("file:", "data:", "blob:")):
                route.continue_()
            else:
                opened.outside.append(route.request.url)
                route.abort()

        opened.page.route("**/*", guard)
        opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.page.on(
            "console",
            lambda said: (
                opened.errors.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        opened.page.goto(path.as_uri())
        opened.page.wait_for_selector("html[data-ready=yes]", state="attached")
        return opened

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def figures_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All parts, on small models."""
    return make_whole_page(tmp_path_factory.mktemp("page"), exports=False)


def _audits() -> list[Audit]:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4), 3, enable_nested_tensor=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in layers.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    before = audit_model(layers, name="before", tokens=24)
    with_scale = [1.0, 3.0]
    return [
        replace(
            before,
            name=f"{name}{HOSTILE}",
            caveats=(f"caveat {HOSTILE}",),
            skipped=(Skipped(name=f"layer {HOSTILE}", reason=f"why {HOSTILE}"),),
            rows=tuple(
                replace(
                    row,
                    name=f"{HOSTILE}.{row.layer}",
                    reason=f"{row.reason} {HOSTILE}",
                    r=row.r * scale,
                    eigenvalues_real=tuple(scale * x for x in row.eigenvalues_real),
                    rho=tuple(x / scale for x in row.rho),
                )
                for row in before.rows
            ),
        )
        for name, scale in zip(("first", "second"), with_scale, strict=True)
    ]


@pytest.fixture(scope="session")
def audits() -> list[Audit]:
    """The same model twice, the second with other numbers; every name of it is an attack."""
    return _audits()


@pytest.fixture(scope="session")
def one_audit_page(audits: list[Audit], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one") / "audit.html"
    path.write_text(audit_page(audits[:1]))
    return path


@pytest.fixture(scope="session")
def two_audits_page(audits: list[Audit], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "audit.html"
    path.write_text(audit_page(audits))
    return path
