import itertools
import math

import pytest
import torch

from locater import QKForm, TokenProcess, propagation, rho_limit
from locater.paper import curves, figures


def values(records: list[curves.Record], name: str, field: str) -> list[float]:
    return [record[field] for record in records if record["curve"] == name]


@pytest.mark.paper("Fig. 1")
def test_piecewise_softmax_touches_the_softmax_at_the_origin_only() -> None:
    records = curves.softmax_curves()
    smooth, straight = (values(records, n, "value") for n in ("softmax", "piecewise linear"))
    gap = values(records, "softmax", "gap")
    equal = [x for x, a, b in zip(gap, smooth, straight, strict=True) if math.isclose(a, b)]
    assert equal == pytest.approx([0.0])


@pytest.mark.paper("Fig. 2")
def test_every_panel_of_fig_2_has_three_curves_of_the_library() -> None:
    records = curves.rho_grid(xis=(5,), etas=(0.5,), tokens=16, dim=36)
    assert list(dict.fromkeys(record["curve"] for record in records)) == [
        curves.PRINTED,
        curves.CORRECTED,
        "exact, T = 16, d = 36",
    ]
    theta = torch.tensor(values(records, curves.CORRECTED, "theta"), dtype=torch.float64)
    corrected = rho_limit(theta, xi=5.0, eta=0.5).tolist()
    assert values(records, curves.CORRECTED, "rho") == corrected
    exact = propagation(QKForm.from_xi_eta(5.0, 0.5, dim=36), TokenProcess.random_walk(16))
    assert values(records, "exact, T = 16, d = 36", "rho") == exact.rho.tolist()


@pytest.mark.paper("Fig. 3")
def test_beyond_the_threshold_late_tokens_are_off() -> None:
    records = curves.threshold_curves()
    last = {
        r["xi"]: r["rho"] for r in records if r["curve"] == curves.CORRECTED and r["theta"] == 1
    }
    assert last[128.0] > 0.999
    assert last[512.0] < 0.001


@pytest.mark.paper("Fig. 4")
def test_printed_entropy_bound_exceeds_every_entropy() -> None:
    records = curves.entropy_curves(tokens=64)
    assert max(values(records, curves.PRINTED, "entropy")) > 4 * math.log(64)
    bound = values(records, "attained bound", "entropy")
    assert bound[0] == pytest.approx(math.log(64))
    assert all(a > b for a, b in itertools.pairwise(bound))


def test_charts_are_valid_and_described() -> None:
    charts = (
        figures.softmax_chart(curves.softmax_curves(points=5)),
        figures.rho_grid_chart(curves.rho_grid(xis=(1,), etas=(1,), tokens=4, dim=4)),
        figures.threshold_chart(curves.threshold_curves()),
        figures.entropy_bound_chart(curves.entropy_curves(points=5)),
    )
    for chart in charts:
        spec = chart.to_dict(validate=True)  # type: ignore[attr-defined]
        described = spec.get("spec", spec)
        assert described["description"]
