"""What is said of a comparison follows from its seeds, by the protocol's rules."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from locater import ConfigError
from locater.paper.lab.presets import SWEEPS, Setting, Sweep, compared, grid_of
from locater.paper.lab.run import Run
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.summary import (
    PERPLEXITY,
    SCALE,
    Comparison,
    chosen,
    compare,
    holm,
    judged,
    trend,
    with_tests,
)
from locater.paper.lab.sweep import confirmed

MARGIN = PERPLEXITY.margin


def compared_with(*differences: float, diverged: tuple[int, int] = (0, 0)) -> Comparison:
    return with_tests(Comparison(differences=differences, diverged=diverged))


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ((-0.030, -0.028, -0.031, -0.029, -0.032), "lower"),
        ((0.030, 0.028, 0.031, 0.029, 0.032), "higher"),
        ((0.0003, -0.0002, 0.0001, -0.0004, 0.0002), "equivalent"),
        ((0.05, -0.04, 0.02, -0.03, 0.01), "undecided"),
        ((-0.03,), "undecided"),  # one seed decides nothing
    ],
)
def test_each_case_of_the_protocol(differences: tuple[float, ...], said: str) -> None:
    assert compared_with(*differences).finding == said


def test_both_tests_are_those_of_scipy() -> None:
    values = (0.004, -0.001, 0.003, 0.002, 0.0005)
    found = compared_with(*values)
    assert found.p_different == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    above = stats.ttest_1samp(values, MARGIN, alternative="less").pvalue
    below = stats.ttest_1samp(values, -MARGIN, alternative="greater").pvalue
    assert found.p_apart == pytest.approx(max(above, below))


def test_a_small_but_certain_difference_says_how_small() -> None:
    assert "lower, but by less than .5 %" in compared_with(-0.002, -0.0021, -0.0019).sentence
    assert "but" not in compared_with(-0.02, -0.021, -0.019).sentence


def test_a_large_change_is_told_as_a_ratio() -> None:
    assert SCALE.text([math.log(8000)] * 3) == "× 8,000 [8,000, 8,000]"
    assert SCALE.text([math.log(0.05)]) == "× 0.05"
    assert SCALE.text([math.log(1.5), math.log(1.5)]) == "+50.00 ± 0.00 %"


def test_runs_that_diverged_are_said_and_not_tested() -> None:
    found = compared_with(-0.03, -0.031, -0.029, diverged=(0, 2))
    assert math.isnan(found.p_different)
    assert found.finding == "undecided"
    assert found.sentence == "no test: 0 runs without it and 2 with it diverged"


def test_holm_corrects_over_all_comparisons() -> None:
    """Of eight certain at 1 % each the correction leaves none at 5 %; of one it leaves it."""
    assert holm([0.01] * 8) == pytest.approx([0.08] * 8)
    assert holm([0.001, 0.2, 0.03])[0] == pytest.approx(0.003)
    assert holm([0.02, math.nan])[0] == pytest.approx(0.04)  # one that is not there yet counts
    one = compared_with(-0.010, -0.012, -0.014, -0.008, -0.016)
    assert one.finding == "lower"
    weak = compared_with(-0.010, -0.004, -0.014, -0.018, -0.003)
    assert weak.finding == "lower"
    assert [c.finding for c in judged([one, *[weak] * 7])] == ["lower", *["undecided"] * 7]


@pytest.mark.statistical
def test_the_rate_of_false_alarms_is_the_nominal_one(seed: int) -> None:
    """2,000 comparisons without an effect: 5 % are called different, within 4 standard errors."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(2000, 5, generator=generator, dtype=torch.float64) * 0.01
    wrong = [compared_with(*row).finding in ("lower", "higher") for row in draws.tolist()]
    assert abs(sum(wrong) / 2000 - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 2000)


def fake(config: TrainConfig, loss: float) -> Run:
    records = [
        {"step": 1, "whole_valid_loss": loss + 0.1},
        {"step": 2, "whole_valid_loss": loss},
        {"step": 3, "whole_valid_loss": loss + 0.2, "end": "finished"},
    ]
    return Run(config, {}, records)


RATES = {"learning_rate": [1e-3, 2e-3]}


def trained(sweep: Sweep) -> dict[str, Run]:
    """No method is best at 2e-3, qk-norm at 8e-3; it gains .02 and seeds differ by .1."""
    found = {}
    for config in sweep.configs():
        best = 8e-3 if config.stabilizer == "qk-norm" else 2e-3
        loss = 4 + abs(math.log(config.learning_rate / best)) + 0.1 * (config.seed % 7)
        gain = 0.02 + 0.0001 * (config.seed % 3) if config.stabilizer == "qk-norm" else 0.0
        found[config.digest] = fake(config, loss - gain)
    return found


def test_a_comparison_pairs_the_best_losses_of_equal_seeds() -> None:
    sweep = compared("s", "?", TrainConfig(), ["none", "qk-norm"], seeds=3, first_seed=5)
    runs = trained(sweep)
    found = compare(sweep, runs, sweep.settings[1])
    gap = math.log(8e-3 / 2e-3)
    losses = [-0.02 - 0.0001 * (seed % 3) + gap for seed in (5, 6, 7)]
    # the rate is 2.5e-5 for both: no method is nearer to its best by log(8e-3/2e-3)
    assert found.differences == pytest.approx(losses)
    del runs[replace(sweep.settings[1].config, seed=6).digest]
    assert len(compare(sweep, runs, sweep.settings[1]).differences) == 2


def test_a_trend_is_the_slope_over_the_logarithm_of_the_strength() -> None:
    """Against numpy's least squares, seed by seed; κ₂ = 0 is set aside unless but one is left."""
    kappas = (0.0, 1e-3, 1e-2, 1e-1, 1.0)
    settings = [
        Setting(label=f"{k:g}", config=replace(TrainConfig(), mean_strength=k), kappa=k)
        for k in kappas
    ]
    sweep = Sweep(name="s", question="?", settings=tuple(settings), seeds=3)
    generator = torch.Generator().manual_seed(0)
    losses = 4 + torch.rand(3, len(kappas), generator=generator, dtype=torch.float64)
    runs = {}
    for seed in range(3):
        for place, setting in enumerate(settings):
            config = replace(setting.config, seed=seed)
            runs[config.digest] = fake(config, losses[seed, place].item())
    x = np.log(kappas[1:])
    slopes = [np.polyfit(x, row[1:].numpy(), 1)[0] * (x[-1] - x[0]) for row in losses]
    assert trend(sweep, runs, settings, PERPLEXITY).differences == pytest.approx(slopes)
    ends = trend(sweep, runs, [settings[0], settings[-1]], PERPLEXITY).differences
    assert ends == pytest.approx((losses[:, -1] - losses[:, 0]).tolist())


def test_a_trend_with_a_run_that_diverged_in_the_middle_is_not_tested() -> None:
    kappas = (1e-3, 1e-2, 1e-1)
    settings = tuple(
        Setting(label=f"{k:g}", config=replace(TrainConfig(), mean_strength=k), kappa=k)
        for k in kappas
    )
    sweep = Sweep(name="s", question="?", settings=settings, seeds=3)
    runs = {config.digest: fake(config, 4.0 - config.mean_strength) for config in sweep.configs()}
    lost = replace(settings[1].config, seed=1)
    runs[lost.digest] = Run(lost, {}, [{"step": 1, "end": "diverged"}])
    found = trend(sweep, runs, settings, PERPLEXITY)
    assert math.isnan(found.p_different)
    assert found.sentence == "no test: 0 runs without it and 1 with it diverged"


def test_no_seed_may_choose_and_judge() -> None:
    for first, seeds in ((200, 2), (196, 5), (204, 2)):
        sweep = compared("s", "?", TrainConfig(), ["none"], grid=RATES, seeds=seeds,
                         first_seed=first)  # fmt: skip
        with pytest.raises(ConfigError, match="none may do both"):
            confirmed(sweep, trained, seeds=5)


def test_a_rate_that_is_still_at_the_end_of_its_grid_is_called_so() -> None:
    def ever_better(sweep: Sweep) -> dict[str, Run]:
        return {c.digest: fake(c, 4 - c.learning_rate) for c in sweep.configs()}

    sweep = compared("s", "?", TrainConfig(), ["none"], grid=RATES, seeds=2, first_seed=100)
    fresh, _ = confirmed(sweep, ever_better, seeds=5)
    assert fresh.settings[0].label == "learning_rate = 0.064, none (end of the grid)"


def test_every_method_is_judged_at_its_own_rate_on_fresh_seeds() -> None:
    sweep = compared("s", "?", TrainConfig(), ["none", "qk-norm"], grid=RATES, seeds=2,
                     first_seed=100)  # fmt: skip
    first = chosen(sweep, trained(sweep))
    assert {name: one.config.learning_rate for name, one in first.items()} == {
        "none": 2e-3,
        "qk-norm": 2e-3,
    }
    fresh, runs = confirmed(sweep, trained, seeds=5)
    rates = {one.method: one.config.learning_rate for one in fresh.settings}
    assert rates == pytest.approx({"none": 2e-3, "qk-norm": 8e-3})  # its grid was widened twice
    assert [*fresh.all_seeds] == [200, 201, 202, 203, 204]
    (method,) = (one for one in fresh.settings if one.method == "qk-norm")
    assert compare(fresh, runs, method).finding == "lower"


def test_a_method_without_a_whole_point_of_the_grid_says_so() -> None:
    sweep = compared("s", "?", TrainConfig(), ["none", "qk-norm"], grid=RATES, seeds=2,
                     first_seed=100)  # fmt: skip
    runs = {
        digest: run
        for digest, run in trained(sweep).items()
        if run.config.stabilizer == "none" or run.config.seed == 100
    }
    labels = {name: one.label for name, one in chosen(sweep, runs).items()}
    assert labels["qk-norm"].endswith("no choice")
    assert not labels["none"].endswith("no choice")


def test_a_grid_is_read_as_typed() -> None:
    assert grid_of(["learning_rate=5e-4,1e-3", "layers=1,2", "qk_bias=true,false"]) == {
        "learning_rate": [5e-4, 1e-3],
        "layers": [1, 2],
        "qk_bias": [True, False],
    }
    for wrong in ("learning_rate", "speed=1", "seed=1,2", "layers=one"):
        with pytest.raises(ConfigError):
            grid_of([wrong])


def test_the_protocol_keeps_its_seeds_apart() -> None:
    """Seeds that chose a rate, seeds that judged before, and seeds that judge are disjoint."""
    looked_at = {
        seed for name, one in SWEEPS.items() if name.endswith("-cpu") for seed in one.all_seeds
    }
    judging = {
        seed
        for name, one in SWEEPS.items()
        if name.startswith(("passes", "depth", "words"))
        for seed in one.all_seeds
    }
    assert not looked_at & judging
    for name in ("tuned", "task-masked", "task-digits", "task-pre-ln", "task-modern"):
        assert not {*SWEEPS[name].all_seeds} & (judging | looked_at | {*range(200, 210)})
