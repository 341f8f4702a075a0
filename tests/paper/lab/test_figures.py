"""Figs. 6-12 come from runs alone, and show what the runs hold."""

import math
from dataclasses import replace

import altair as alt
import pytest

from locater.paper.lab.figures import (
    NONE,
    comparison_chart,
    curve_records,
    gates_chart,
    lab_chart,
    size_note,
)
from locater.paper.lab.presets import SWEEPS, Sweep
from locater.paper.lab.run import Run
from locater.paper.lab.settings import TrainConfig
from locater.report.charts import specification

STEPS = (0, 1250, 2500)


def fake(config: TrainConfig, place: int) -> Run:
    """Losses that fall, a little less with each setting and seed; two layers where there are."""
    records = []
    for step in STEPS:
        record = {
            "step": step,
            "valid_loss": 5.0 - step / 2500 + 0.01 * place + 0.1 * config.seed,
            "trace": [1.0 + place, 3.0 + place],
            "frobenius_squared": [2.0, 4.0],
            "entropy": [3.0, 3.0],
            "rho": [[0.25, 0.5, 0.75], [1.0, 1.0, 1.0]],
        }
        records.append(record)
    records[-1] |= {"end": "finished", "whole_valid_loss": records[-1]["valid_loss"]}
    return Run(config, {}, records)


def runs_of(sweep: Sweep) -> dict[str, Run]:
    return {
        (config := replace(setting.config, seed=seed)).digest: fake(config, place)
        for place, setting in enumerate(sweep.settings)
        for seed in range(sweep.seeds)
    }


@pytest.mark.parametrize("name", ["fig8-cpu", "fig7-cpu", "ablation-cpu"])
def test_every_kind_of_sweep_has_a_chart_that_vega_accepts(name: str) -> None:
    sweep = SWEEPS[name]
    chart = lab_chart(sweep, runs_of(sweep))
    spec = chart.to_dict()  # held against the schema
    assert spec == specification(chart)
    assert "sized for a CPU: " in str(spec)


def test_curves_are_means_over_seeds_with_their_range() -> None:
    sweep = SWEEPS["fig6-cpu"]
    records = curve_records(sweep, runs_of(sweep))
    (row,) = [
        record
        for record in records
        if (record["reading"], record["kappa"], record["panel"], record["step"])
        == ("printed", NONE, "perplexity", 2500)
    ]
    values = [math.exp(4.0 + 0.1 * seed) for seed in range(sweep.seeds)]
    assert row["value"] == pytest.approx(sum(values) / len(values))
    assert (row["low"], row["high"]) == (pytest.approx(values[0]), pytest.approx(values[-1]))
    trace = [r["value"] for r in records if r["panel"] == "trace" and r["kappa"] == NONE]
    assert set(trace) == {2.0}  # layers averaged
    tail = {r["step"] for r in records if r["panel"] == "tail"}
    assert tail == {2500}
    readings = {r["reading"] for r in records if r["kappa"] == NONE}
    assert readings == {"printed", "swapped-sum-normalized"}  # the baseline stands in every row


def test_the_heat_map_has_every_token_at_every_step() -> None:
    setting = SWEEPS["fig7-cpu"].settings[1]
    records = gates_chart("one", fake(setting.config, 0)).to_dict()["data"]["values"]
    assert [r["rho"] for r in records] == [0.25, 0.5, 0.75] * 3
    assert [r["token"] for r in records[:3]] == [1, 2, 3]
    assert {r["step"] for r in records} == set(STEPS)


def test_a_heat_map_has_no_gap_where_steps_are_uneven() -> None:
    run = fake(TrainConfig(), 0)
    for record, step in zip(run.records, (0, 125, 500), strict=True):
        record["step"] = step
    records = gates_chart("one", run).to_dict()["data"]["values"]
    cells = {(record["step"], record["until"]) for record in records}
    assert cells == {(0, 125), (125, 500), (500, 875)}


def test_a_chart_draws_what_is_there_when_runs_are_missing() -> None:
    sweep = SWEEPS["fig6-cpu"]
    some = dict(list(runs_of(sweep).items())[:4])
    for chart in (lab_chart(sweep, some), comparison_chart(sweep, some)):
        assert isinstance(chart, alt.TopLevelMixin)
        assert specification(chart)["title"]["text"] == sweep.question


def test_the_note_says_what_is_not_the_papers() -> None:
    assert size_note(TrainConfig()) == "the paper's size"
    note = size_note(SWEEPS["fig6-cpu"].settings[0].config)
    for part in ("2,500 steps for 50,000", "batch 16 for 64", "rate 0.0005", "2,048 pieces"):
        assert part in note
