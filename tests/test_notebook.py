"""Results in a notebook: a line, a table, data and a picture, whatever made them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from locater import Probe, QKForm, TokenProcess, audit_model, propagation
from locater.audit.compare import compare_checkpoints
from locater.control.trial import Trial, TrialConfig, TrialRun
from locater.notebook import SHOWN, Shown
from locater.paper.lab.run import Run
from locater.reality.what_if import Change, WhatIf
from locater.simulation import SimulateConfig, simulate

ROOT = Path(__file__).parents[1]


def results() -> dict[str, Shown]:
    generator = torch.Generator().manual_seed(0)
    form = QKForm(*torch.randn(2, 20, 4, 8, generator=generator), temperature=2.0)
    process = TokenProcess.random_walk(5)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with Probe(layer) as probe:
        layer(torch.randn(2, 4, 8, generator=generator))
    rows = ({"name": "<b>", "layer": 0, "head": 0, "entropy_before": 1.0, "entropy_after": 2.0},)
    small = SimulateConfig(tokens=4, model=8, sequences=10, draws=1, pairs=((0.5, 0.1),))
    return {
        "form": form,
        "spectrum": form.spectrum(),
        "process": process,
        "profile": propagation(form, process),
        "audit": audit_model(layer, tokens=8),
        "probe": probe,
        "what if": WhatIf(model="<i>m</i>", change=Change(), tokens=8, rows=rows),
        "simulation": simulate(small),
    }


@pytest.fixture(scope="module")
def shown() -> dict[str, Shown]:
    return results()


NAMES = ["form", "spectrum", "process", "profile", "audit", "probe", "what if", "simulation"]


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_a_line_a_table_data_and_a_picture(name: str, shown: dict[str, Shown]) -> None:
    result = shown[name]
    line = repr(result)
    assert "\n" not in line and len(line) < 250 and type(result).__name__ in line
    html = result._repr_html_()
    rows = result._table()
    assert html.count("<tr>") == 1 + min(len(rows), SHOWN)
    assert ("more rows" in html) == (len(rows) > SHOWN)
    told = json.loads(result.to_json())
    assert len(told["rows"] if name == "audit" else told) == len(rows)
    frame = result.to_dataframe()
    assert len(frame) == len(rows)
    chart = result.plot().to_dict()
    drawn = chart["data"]["values"]
    across, up = (chart["encoding"][axis]["field"] for axis in "xy")
    assert len(drawn) == len(rows) and drawn[0][across] is not None and drawn[0][up] is not None


def test_numbers_are_those_of_the_result(shown: dict[str, Shown]) -> None:
    profile: Any = shown["profile"]
    frame = profile.to_dataframe()
    assert frame.rho.tolist() == profile.rho.flatten().tolist()
    form: Any = shown["form"]
    assert form.to_dataframe().trace.tolist() == form.spectrum().trace.tolist()


def test_names_stay_text(shown: dict[str, Shown]) -> None:
    html = shown["what if"]._repr_html_()
    assert "<b>" not in html and "<i>" not in html and "&lt;b&gt;" in html


def test_comparisons_runs_and_trials_too(samples: Path) -> None:
    changed = compare_checkpoints(samples / "model", samples / "tuned", tokens=8)
    assert len(changed.to_dataframe()) == 8 and "8 heads" in repr(changed)
    runs = [TrialRun("none", rate, 0, 2.0, None, None, None) for rate in (1e-3, 1e-2)]
    trial = Trial(TrialConfig(methods=("none",), learning_rates=(1e-3, 1e-2)), runs)
    assert trial.to_dataframe().learning_rate.tolist() == [1e-3, 1e-2]
    run = Run.load(next((ROOT / "results" / "lab").glob("*.jsonl")))
    assert len(run.to_dataframe()) == len(run.records) and len(repr(run)) < 200


def test_without_pandas_it_says_so(
    shown: dict[str, Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(Exception, match="needs pandas") as told:
        shown["form"].to_dataframe()
    assert "pip install pandas" in str(told.value)
