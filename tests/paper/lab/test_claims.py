"""Verdicts on training follow the runs: direction, seeds, and one reading for all of a claim."""

import math
from dataclasses import replace

import pytest

from locater.paper.lab.claims import curve_verdicts, stripes_verdict
from locater.paper.lab.presets import Setting, Sweep
from locater.paper.lab.run import Run
from locater.paper.lab.settings import TrainConfig

BASE = TrainConfig(steps=4)
SETTINGS = (
    Setting(label="none", config=BASE),
    *(
        Setting(
            label=f"{reading} {kappa:g}",
            config=replace(BASE, scale_strength=strength, mean_strength=kappa),
            reading=reading,
            kappa=kappa,
        )
        for strength, reading in ((1.0, "printed"), (2.0, "swapped"))
        for kappa in (1.0, 0.0)  # not in order
    ),
)
FLAT, STRIPES = [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]


def results(
    values: dict[str, tuple[float, float, float]], *, seeds: int, stripes: str = ""
) -> tuple[Sweep, dict[str, Run]]:
    """A sweep and its runs: loss, scale and entropy by setting, with a little noise by seed."""
    sweep = Sweep(name="fig6-trial", question="?", settings=SETTINGS, seeds=seeds)
    runs = {}
    for setting in SETTINGS:
        loss, scale, entropy = values[setting.label]
        for seed in range(seeds):
            config, own = replace(setting.config, seed=seed), 0.3 * seed  # common to all settings
            noise = 1e-3 * math.sin(seed + len(setting.label))
            rho = STRIPES if stripes and setting.reading == stripes else FLAT
            record = {
                "step": 4,
                "end": "finished",
                "whole_valid_loss": loss + own + noise,
                "entropy": [entropy + own + noise],
                "trace": [1.0],
                "frobenius_squared": [scale * math.exp(own + noise)],
                "rho": [[rho[0] * (1 - abs(noise)), *rho[1:]]],
            }
            runs[config.digest] = Run(config, {}, [record])
    return sweep, runs


AS_CLAIMED = {
    "none": (4.0, 10.0, 2.0),
    "printed 0": (4.0, 5.0, 2.0),
    "printed 1": (3.9, 1.0, 2.5),
    "swapped 0": (4.1, 1.0, 2.0),
    "swapped 1": (4.2, 2.0, 1.9),
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["reproduced"] * 4),
        ({"printed 1": (4.1, 7.0, 1.9)}, ["differs"] * 4),
        # more entropy under one reading and a lower loss under another: not what the paper says
        (
            {"printed 1": (4.1, 1.0, 2.5), "swapped 1": (3.9, 2.0, 1.9)},
            ["reproduced", "reproduced", "reproduced", "differs"],
        ),
        # better than κ₂ = 0, but not than no LocAteR
        (
            {"printed 0": (4.2, 5.0, 1.5), "printed 1": (4.1, 1.0, 1.9)},
            ["reproduced", "reproduced", "reproduced", "differs"],
        ),
    ],
)
def test_a_claim_on_training_holds_where_its_numbers_do(
    change: dict[str, tuple[float, float, float]], expected: list[str]
) -> None:
    sweep, runs = results(AS_CLAIMED | change, seeds=3)
    verdicts = curve_verdicts(sweep, runs, "fig6")
    assert [verdict.outcome for verdict in verdicts] == expected
    assert [verdict.where for verdict in verdicts] == [
        "Fig. 6B",
        "Fig. 6C",
        "Fig. 6D",
        "Fig. 6, Sec. 7",
    ]


def test_one_seed_decides_nothing() -> None:
    sweep, runs = results(AS_CLAIMED, seeds=1, stripes="printed")
    verdicts = [*curve_verdicts(sweep, runs, "fig8"), stripes_verdict(sweep, runs, "fig7")]
    assert {verdict.outcome for verdict in verdicts} == {"undecided"}
    assert "one seed" in verdicts[0].found and "cannot tell" in verdicts[0].found


def test_stripes_are_fewer_tokens_with_locater_than_without() -> None:
    sweep, runs = results(AS_CLAIMED, seeds=3, stripes="printed")
    assert stripes_verdict(sweep, runs, "fig7").outcome == "reproduced"
    sweep, runs = results(AS_CLAIMED, seeds=3)
    assert stripes_verdict(sweep, runs, "fig7").outcome == "differs"


def test_one_strength_has_no_trend() -> None:
    sweep, runs = results(AS_CLAIMED, seeds=3)
    few = tuple(setting for setting in sweep.settings if setting.kappa != 0.0)
    (verdict,) = curve_verdicts(replace(sweep, settings=few), runs, "fig12")
    assert (verdict.where, verdict.outcome) == ("Fig. 12, Sec. 7", "reproduced")
