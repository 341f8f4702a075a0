"""Claim: the quick page and the audit page of a 32 x 32-head model stay under 5 MB, are made in
about a second of CPU, and answer the reader within seconds of being opened, also on busy cores.

Generation is CPU time of one core; opening is wall time in Chromium, from the address to the last
chart, of a file on disk (a page from a server comes on top).
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from timing import Timing, cpu_time
from torch import nn

from locater.audit import Audit, audit_model
from locater.paper.reproduce import ReproduceConfig, reproduce
from locater.report.audit_view import audit_page

CHROMIUM = os.environ.get("LOCATER_CHROMIUM") or shutil.which("chromium")
LIMIT = 5_000_000


def large_audit(name: str = "32x32", *, layers: int = 32, heads: int = 32) -> Audit:
    """Numbers of the size that a 7-billion-parameter model has: 1024 heads of dimension 128."""
    small = audit_model(nn.TransformerEncoderLayer(16, 2), tokens=512)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for layer in range(layers):
        for head in range(heads):
            real, imaginary, singular = torch.randn(3, 128, generator=generator).tolist()
            noise = torch.rand(len(small.positions), generator=generator).tolist()
            rows.append(
                replace(
                    small.rows[0],
                    name=f"model.layers.{layer}.self_attn",
                    layer=layer,
                    head=head,
                    entropy=6 * noise[0],
                    effective_tokens=400 * noise[1],
                    r=3 * real[0],
                    verdict="healthy" if noise[2] > 0.1 else "collapsed",
                    reason=f"attention rests on {400 * noise[1]:.3g} of 512 tokens",
                    eigenvalues_real=tuple(real),
                    eigenvalues_imag=tuple(imaginary),
                    singular_values=tuple(sorted(map(abs, singular), reverse=True)),
                    rho=tuple(noise),
                )
            )
    return replace(small, name=name, rows=tuple(rows))


def opening(path: Path, *, repeats: int = 3) -> str:
    """Seconds until the first chart answers and until all are drawn."""
    if not CHROMIUM:
        return "no Chromium here"
    from playwright.sync_api import sync_playwright

    first, last = [], []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for _ in range(repeats):
            page = browser.new_page()
            start = time.perf_counter()
            page.goto(path.as_uri(), wait_until="commit")
            page.wait_for_selector(".chart[data-drawn=yes]", state="attached")
            first.append(time.perf_counter() - start)
            page.wait_for_selector("html[data-ready=yes]", state="attached")
            last.append(time.perf_counter() - start)
            page.close()
        browser.close()
    return f"first chart {Timing(first)}, all {Timing(last)}"


def show(name: str, path: Path, made: Timing) -> None:
    size = path.stat().st_size
    print(f"{name:26} {size / 1e6:5.2f} MB   made in {made} CPU   opened: {opening(path)}")
    assert size < LIMIT, f"{name} is larger than {LIMIT:,} bytes"


def main() -> None:
    with TemporaryDirectory() as folder:
        out = Path(folder)
        config = ReproduceConfig(out=out, exports=False)
        reproduce(config)  # the simulations are kept; what follows is the page itself
        made = cpu_time(lambda: reproduce(config), repeats=3, warmup=False)
        show("quick page, parts at hand", out / "index.html", made)
        one, two = large_audit(), large_audit("32x32, tuned")
        path = out / "audit.html"
        made = cpu_time(lambda: path.write_text(audit_page([one])), repeats=3)
        show("audit page, 32 x 32 heads", path, made)
        made = cpu_time(lambda: path.write_text(audit_page([one, two])), repeats=3)
        show("the same, two of them", path, made)


if __name__ == "__main__":
    main()
