import itertools
import math

import pytest
import torch

from locater.core.theory import Profile
from locater.paper.figures import entropy_records, fig5_chart, fig5_verdicts, findings, rho_records
from locater.simulation import SimulateConfig, Simulation, UnitResult, simulate

FLAT = [1.0, 1.0, 1.0, 1.0]
SHARP = [0.0, 1.0, 0.0, 0.0]
WIDER = [0.05, 1.0, 0.0, 0.0]  # participation 1.1 times that of SHARP
ALIKE = [0.003, 1.0, 0.0, 0.0]  # 1.006 times
Cell = tuple[list[float], float]


def made(cells: dict[tuple[float, float], Cell], *, spread: float = 0.001) -> Simulation:
    """A simulation with this ρ and entropy at every (mean, scale), in two draws."""
    config = SimulateConfig(tokens=4, model=2, draws=2, pairs=tuple(cells))
    theta = torch.arange(1, 5, dtype=torch.float64) / 4
    units = []
    for (mean, scale), (rho, entropy) in cells.items():
        for draw, side in enumerate((-1, 1)):
            exact = Profile(theta=theta, rho=torch.tensor(rho, dtype=torch.float64))
            error = torch.full_like(theta, 0.01)
            sampled = Profile(
                theta=theta, rho=exact.rho * 0.9, source="simulated", standard_error=error
            )
            units.append(
                UnitResult(
                    mean=mean,
                    scale=scale,
                    draw=draw,
                    xi=1.0,
                    eta=1.0,
                    count=sampled,
                    conditional=sampled,
                    exact=exact,
                    entropy=entropy + side * spread,
                    entropy_error=spread,
                )
            )
    return Simulation(config, units)


def grid(flat: Cell, flat_wide: Cell, top: Cell, top_wide: Cell) -> Simulation:
    """Means 0 and 1, scales .1 and .5."""
    pairs = itertools.product((0.0, 1.0), (0.1, 0.5))
    return made(dict(zip(pairs, (flat, flat_wide, top, top_wide), strict=True)))


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (FLAT, SHARP, "Yes: share of tokens on 1.000 → 0.250"),
        ([0.1, 1.0, 0.0, 0.0], SHARP, "Yes: share of tokens on 0.300 → 0.250"),
        (WIDER, SHARP, "A little: share of tokens on 0.275 → 0.250"),
        (ALIKE, SHARP, "No: share of tokens on 0.251 → 0.250"),
        (SHARP, FLAT, "No: share of tokens on 0.250 → 1.000"),
    ],
)
def test_localization_is_read_off_the_participation(
    low: list[float], high: list[float], words: str
) -> None:
    by_mean = findings(grid((low, 1.0), (low, 1.0), (high, 0.5), (high, 0.5)))
    assert by_mean[0] == f"Does a larger mean localize ρ? {words}, from mean 0 to 1."
    assert "No: " in by_mean[1]
    by_scale = findings(grid((FLAT, 1.0), (FLAT, 1.0), (high, 0.5), (low, 0.5)))
    assert by_scale[1] == f"Does a smaller scale, at mean 1? {words}, from scale 0.5 to 0.1."


@pytest.mark.parametrize(
    ("wide", "narrow", "words"),
    [
        (0.5, 0.6, "yes: 0.500 → 0.600"),
        (0.6, 0.5, "no, it falls: 0.600 → 0.500"),
        (0.5, 0.502, "no change: 0.500 → 0.502"),
    ],
)
def test_entropy_changes_only_beyond_its_error(wide: float, narrow: float, words: str) -> None:
    # two draws at ± .001 have a standard error of .001, so the difference has 2·√2·.001
    at_top = findings(grid((FLAT, 1.0), (FLAT, 1.0), (SHARP, narrow), (SHARP, wide)))[2]
    assert f"At mean 1 {words} (± 0.003);" in at_top
    at_zero = findings(grid((FLAT, narrow), (FLAT, wide), (SHARP, 1.0), (SHARP, 1.0)))[2]
    assert at_zero.endswith(f"at mean 0 {words} (± 0.003).")


@pytest.mark.parametrize(
    ("rho", "entropy", "words"),
    [
        (SHARP, 0.2, "Sharp ρ goes with low entropy: 0.20 nats at mean 1, 1.00 at mean 0, of"),
        (SHARP, 1.2, "Sharp ρ goes with high entropy: 1.20 nats at mean 1, 1.00 at mean 0, of"),
        (FLAT, 0.2, "Flat ρ goes with low entropy"),
        (FLAT, 1.2, "Flat ρ goes with high entropy"),
    ],
)
def test_sharpness_and_entropy_are_two_things(rho: list[float], entropy: float, words: str) -> None:
    last = findings(grid((FLAT, 1.0), (FLAT, 1.0), (rho, entropy), (rho, entropy)))[3]
    assert last.startswith(words)
    assert last.endswith(f"of at most {math.log(4):.2f}.")


@pytest.mark.parametrize(
    "pairs", [[(0.0, 0.1)], [(0.0, 0.1), (1.0, 0.1)], [(0.0, 0.1), (1.0, 0.5), (1.0, 0.1)]]
)
def test_without_a_grid_nothing_is_claimed_and_the_chart_is_drawn(
    pairs: list[tuple[float, float]],
) -> None:
    simulation = made(dict.fromkeys(pairs, (SHARP, 0.5)))
    assert findings(simulation) == []
    assert fig5_chart({"few": simulation}, title="").to_dict(validate=True)


def test_records_carry_bands_within_the_range_of_a_probability() -> None:
    simulation = simulate(
        SimulateConfig(tokens=5, model=4, sequences=20, draws=3, pairs=((0.0, 0.5), (1.0, 0.1)))
    )
    records = rho_records(simulation)
    assert len(records) == 2 * 5
    for (mean, scale), rows in zip(
        simulation.config.pairs, (records[:5], records[5:]), strict=True
    ):
        sampled = simulation.mean_profile(mean, scale)
        exact = simulation.mean_profile(mean, scale, "exact")
        assert sampled.standard_error is not None
        for k, row in enumerate(rows):
            deviation = 2 * sampled.standard_error[k].item()
            assert (row["mean"], row["scale"], row["theta"]) == (f"{mean:g}", scale, (k + 1) / 5)
            assert (row["rho"], row["exact"]) == (sampled.rho[k].item(), exact.rho[k].item())
            assert row["low"] == max(0, row["rho"] - deviation)
            assert row["high"] == min(1, row["rho"] + deviation)
    for row, (mean, scale) in zip(
        entropy_records(simulation), simulation.config.pairs, strict=True
    ):
        entropy, error = simulation.mean_entropy(mean, scale)
        assert (row["low"], row["entropy"], row["high"]) == (
            entropy - 2 * error,
            entropy,
            entropy + 2 * error,
        )


def test_the_chart_is_valid_described_and_says_what_was_found() -> None:
    simulation = grid((FLAT, 1.0), (FLAT, 1.0), (SHARP, 0.5), (WIDER, 0.6))
    spec = fig5_chart({"one": simulation, "two": simulation}, title="Fig. 5").to_dict(validate=True)
    assert [row["title"]["text"] for row in spec["vconcat"]] == ["one", "two"]
    for row in spec["vconcat"]:
        assert row["title"]["subtitle"] == findings(simulation)
        rho, entropy = row["hconcat"]
        assert rho["spec"]["description"]
        assert entropy["description"]


def test_verdicts_on_fig_5_follow_the_simulation() -> None:
    as_the_paper_says = grid((FLAT, 0.6), (FLAT, 0.5), (SHARP, 0.9), (WIDER, 0.8))
    verdicts = fig5_verdicts("one", as_the_paper_says)
    assert [verdict.outcome for verdict in verdicts] == ["reproduced"] * 4
    otherwise = grid((SHARP, 0.9), (SHARP, 0.9), (SHARP, 0.5), (ALIKE, 0.9))
    assert [v.outcome for v in fig5_verdicts("one", otherwise)] == ["differs"] * 4
    assert fig5_verdicts("few", made({(0.0, 0.1): (SHARP, 0.5)})) == []
