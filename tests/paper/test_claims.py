from locater.paper import claims, curves

# by the errata, each of which has a test of its own
WRONG = {"Lemma 1", "Lemma 2.3", "Sec. 4", "Eq. 7", "Eq. 10", "Eq. 4, App. B.2", "Sec. 6"}
RIGHT = {"Lemma 1", "Lemma 2.1", "Lemma 2.2", "Lemma 2.4", "Eqs. 5, 8", "Eq. 3"}


def test_verdicts_on_the_theory_agree_with_the_errata() -> None:
    verdicts = list(claims.theory_verdicts())
    assert {v.where for v in verdicts if v.outcome == "reproduced"} == RIGHT
    assert {v.where for v in verdicts if v.outcome == "paper is wrong"} == WRONG
    assert [v.claim for v in verdicts if v.outcome == "differs"] == [
        "LocAteR's target tr W_QK = 1 localizes attention."
    ]
    found = " ".join(v.found for v in verdicts)
    for number in ("13.0 times", "4.4", "0.381", "11.31 > 1", "1 > 0", "43 of 64", "3 times"):
        assert number in found


def test_verdicts_on_figures_follow_the_records() -> None:
    fig1, fig2 = curves.softmax_curves(), curves.rho_grid(xis=(0, 10), etas=(1,), tokens=8)
    assert [v.outcome for v in claims.fig1_verdicts(fig1)] == ["reproduced"]
    assert [v.outcome for v in claims.fig2_verdicts(fig2)] == ["paper is wrong", "reproduced"]
    assert [v.outcome for v in claims.fig3_verdicts(curves.threshold_curves())] == ["reproduced"]
    assert [v.outcome for v in claims.fig4_verdicts(curves.entropy_curves())] == ["paper is wrong"]


def swapped(records: list[curves.Record], one: str, other: str) -> list[curves.Record]:
    names = {one: other, other: one}
    return [{**r, "curve": names.get(r["curve"], r["curve"])} for r in records]


def test_other_records_would_have_other_verdicts() -> None:
    fig1 = [
        {**r, "value": r["value"] + 0.3 * (r["curve"] == "softmax")}
        for r in curves.softmax_curves()
    ]
    assert [v.outcome for v in claims.fig1_verdicts(fig1)] == ["paper is wrong"]
    fig2 = curves.rho_grid(xis=(0, 10), etas=(1,), tokens=8)
    same = [
        {**r, "rho": 0.5} if r["curve"] in (curves.PRINTED, curves.CORRECTED) else r for r in fig2
    ]
    assert [v.outcome for v in claims.fig2_verdicts(same)] == ["reproduced", "paper is wrong"]
    fig3 = [{**r, "rho": 1.0} for r in curves.threshold_curves()]
    assert [v.outcome for v in claims.fig3_verdicts(fig3)] == ["paper is wrong"]
    fig4 = [{**r, "entropy": min(r["entropy"], 4.0)} for r in curves.entropy_curves(points=31)]
    assert [v.outcome for v in claims.fig4_verdicts(fig4)] == [
        "reproduced"
    ]  # a bound, and one that does not fall
