"""The whole page of `locater reproduce`, all its parts on models and texts of seconds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.paper.lab.test_sweep import in_this_process

from locater.paper import parts
from locater.paper.curves import rho_grid
from locater.paper.lab.presets import Sweep, sweep_named
from locater.paper.lab.sweep import run_sweep
from locater.paper.reproduce import ReproduceConfig, reproduce
from locater.simulation import preset


def small_sweep(name: str) -> Sweep:
    """The sweep of that name with models and texts of seconds."""
    sweep = sweep_named(name)
    sizes = {"dim": 8, "tokens": 16, "batch": 64, "steps": 10, "vocabulary_size": 100}
    settings = tuple(
        replace(one, config=replace(one.config, measure_every=5, predict_every=2, **sizes))
        for one in sweep.settings
    )
    return replace(sweep, settings=settings, seeds=1)


def make_whole_page(
    out: Path,
    *,
    report: Callable[[str], None] = lambda _: None,
    exports: bool = True,
    reality: Path | None = None,
) -> Path:
    """Make it in this process."""
    small = {
        name: replace(panel, draws=2, sequences=20, model=8, tokens=6)
        for name, panel in preset("fig5").items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "sweep_named", small_sweep)
        patch.setattr(parts, "run_sweep", partial(run_sweep, workers=1))
        patch.setattr(parts, "_BLOCKS", {"quick": 100})
        patch.setattr(parts, "preset", lambda _: small)
        grid = partial(rho_grid, (0, 10), (0.5, 1))
        fig2 = replace(parts.PARTS["fig2"], make=partial(parts._FIG2, records=grid))
        patch.setitem(parts.PARTS, "fig2", fig2)
        in_this_process(patch)
        config = ReproduceConfig(out=out, exports=exports, reality=reality)
        return reproduce(config, report=report)
