"""The simulation agrees with the exact theory, on every engine, after any interruption."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from locater.cli import main
from locater.core.form import QKForm
from locater.core.process import TokenProcess
from locater.core.theory import logit_moments, propagation
from locater.errors import ConfigError, InputError, LocaterError
from locater.simulation import (
    Estimator,
    FormName,
    SimulateConfig,
    Simulation,
    UnitResult,
    _Plan,
    generator_of,
    preset,
    run_unit,
    simulate,
)

FALSE_ALARMS = 1e-6  # of a whole test, shared equally by its comparisons
ESTIMATORS: tuple[Estimator, ...] = ("conditional", "count")
PANELS = preset("fig5")
TINY = SimulateConfig(tokens=6, model=5, sequences=40, draws=3, pairs=((0.5, 0.1), (0.0, 0.5)))


def bits(simulation: Simulation) -> list[dict[str, Any]]:
    return [unit.to_dict() for unit in simulation.units]


def form_of(config: SimulateConfig, index: int, process: TokenProcess | None = None) -> QKForm:
    """The W_QK that a unit draws."""
    plan = _Plan(config, process or config.token_process())
    mean, scale = config.pairs[index // config.draws]
    weights = plan.draw_weights(mean, scale, generator_of(config, f"unit {index}"))
    matrix = torch.diag(weights) if weights.ndim == 1 else weights
    return QKForm.from_matrix(matrix, temperature=math.sqrt(config.model))


def is_count_of(unit: UnitResult, rho: torch.Tensor, sequences: int, level: float) -> bool:
    """Whether no count is rejected: exactly binomial, so a false alarm has at most this level."""
    count, rho = (unit.count.rho * sequences).round().numpy(), rho.clamp(0, 1).numpy()
    law = stats.binom(sequences, rho)
    return bool((2 * law.cdf(count) >= level).all() and (2 * law.sf(count - 1) >= level).all())


def bernstein(variance: torch.Tensor, sequences: int, level: float) -> torch.Tensor:
    """How far the mean of so many values within [0, 1] may be off (Maurer and Pontil 2009)."""
    logarithm = math.log(4 / level)  # two sides, each mean + error
    return (2 * variance * logarithm / sequences).sqrt() + 7 * logarithm / (3 * (sequences - 1))


def is_average_of(unit: UnitResult, rho: torch.Tensor, sequences: int, level: float) -> bool:
    """The same for the conditional estimator, an average of probabilities."""
    assert unit.conditional.standard_error is not None
    variance = unit.conditional.standard_error.square() * sequences
    far = (unit.conditional.rho - rho).abs() > bernstein(variance, sequences, level)
    return not bool(far.any())


# Agreement with the exact theory


@pytest.mark.statistical  # resolution: .075 of any rho by either estimator
@pytest.mark.paper("Fig. 5")
@pytest.mark.parametrize("name", PANELS)
def test_every_panel_of_fig_5_has_the_exact_rho_and_not_the_printed_one(
    name: str, seed: int
) -> None:
    config = replace(PANELS[name], sequences=2_000, draws=2, seed=seed)
    process = config.token_process()
    level = FALSE_ALARMS / (len(PANELS) * 2 * 2 * config.units * config.tokens)
    runs = {
        estimator: simulate(replace(config, estimator=estimator, exact=estimator == "conditional"))
        for estimator in ESTIMATORS
    }
    for index, unit in enumerate(runs["conditional"].units):
        assert unit.exact is not None
        printed = propagation(form_of(config, index, process), process, method="as_printed").rho
        for units in (run.units for run in runs.values()):
            for agrees in (is_count_of, is_average_of):
                assert agrees(units[index], unit.exact.rho, config.sequences, level)
                assert not agrees(units[index], printed, config.sequences, level)


@pytest.mark.slow
@pytest.mark.statistical  # resolution: .01 of any rho by counting
@pytest.mark.parametrize("name", PANELS)
def test_the_precise_preset_has_the_exact_rho(name: str, seed: int) -> None:
    config = replace(preset("fig5-precise")[name], draws=2, seed=seed)
    level = FALSE_ALARMS / (len(PANELS) * 2 * config.units * config.tokens)
    for unit in simulate(config).units:
        assert unit.exact is not None
        assert is_count_of(unit, unit.exact.rho, config.sequences, level)
        assert is_average_of(unit, unit.exact.rho, config.sequences, level)


def own_process(seed: int, rank: int = 5) -> TokenProcess:
    """Any kernel, covariance and means, all far from the walk's."""
    generator = torch.Generator().manual_seed(seed + 1)
    kernel = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    color = torch.randn(5, rank, generator=generator, dtype=torch.float64)
    mean = 3 * torch.randn(6, rank, generator=generator, dtype=torch.float64) @ color.mT
    return TokenProcess.from_kernel(kernel @ kernel.mT, covariance=color @ color.mT, mean=mean)


@pytest.mark.statistical  # resolution: .03 of any rho by counting
@pytest.mark.parametrize("form", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rank", [5, 3])
def test_tokens_of_ones_own_have_their_exact_rho_and_not_that_without_means(
    form: FormName, estimator: Estimator, rank: int, seed: int
) -> None:
    config = replace(
        TINY, sequences=20_000, draws=2, form=form, estimator=estimator, pairs=((0.3, 0.7),),
        seed=seed,
    )  # fmt: skip
    process = own_process(seed, rank)
    level = FALSE_ALARMS / (8 * 2 * config.units * config.tokens)
    units = simulate(config, process=process).units
    for agrees in (is_count_of, is_average_of):
        rejected = []
        for index, unit in enumerate(units):
            assert unit.exact is not None
            assert agrees(unit, unit.exact.rho, config.sequences, level)
            centered = propagation(form_of(config, index, process), replace(process, mean=None))
            rejected.append(not agrees(unit, centered.rho, config.sequences, level))
        assert any(rejected)


Z_LIMIT = stats.norm.isf(FALSE_ALARMS / (2 * 4 * (6 + 21)))  # nominal: 6 means, 21 covariances


@pytest.mark.statistical  # resolution: about 8 % of a standard deviation, 16 % of a covariance
@pytest.mark.parametrize("form", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_both_ways_of_drawing_have_the_moments_of_the_logits(
    form: FormName, estimator: Estimator, seed: int
) -> None:
    config = replace(TINY, form=form, estimator=estimator, pairs=((0.3, 0.7),), seed=seed)
    process, draws = own_process(seed), 40_000
    plan, drawn = _Plan(config, process), form_of(config, 0, process)
    white = plan.whiten(drawn.matrix()) / drawn.temperature
    logits, _ = plan.draw(white.float(), draws, torch.Generator().manual_seed(seed))
    centered = logits.double() - logits.double().mean(-1, keepdim=True)  # all that softmax sees

    def agrees(form: QKForm) -> bool:
        mean, covariance = logit_moments(form, process)
        center = torch.eye(6, dtype=torch.float64) - 1 / 6
        mean, covariance = center @ mean, center @ covariance @ center
        apart = centered - mean
        products = (apart[:, :, None] * apart[:, None, :]).flatten(1) - covariance.flatten()
        sample = torch.cat((apart, products), -1)
        error = sample.std(0) / math.sqrt(draws)
        return bool((sample.mean(0).abs() < Z_LIMIT * error).all())

    assert agrees(drawn)
    transposed = QKForm.from_matrix(drawn.matrix().mT, temperature=drawn.temperature)
    # means tell queries from keys; without asymmetry there is nothing to tell
    assert agrees(transposed) == (form == "symmetric")
    assert not agrees(QKForm.from_matrix(1.2 * drawn.matrix(), temperature=drawn.temperature))


@pytest.mark.statistical  # resolution: .02 nats where ln T = 1.8
@pytest.mark.parametrize("own", [False, True])
def test_whole_sequences_and_conditional_draws_have_the_same_entropy(own: bool, seed: int) -> None:
    config = replace(TINY, sequences=100_000, draws=1, exact=False, seed=seed)
    process = own_process(seed) if own else None
    level, most = FALSE_ALARMS / (2 * 2 * config.units), math.log(config.tokens)
    pair = [simulate(replace(config, estimator=name), process=process) for name in ESTIMATORS]
    warmer = simulate(replace(config, temperature=2 * math.sqrt(5)), process=process)

    def agree(one: Simulation, other: Simulation) -> bool:
        """Each entropy, as a share of the largest, is a mean of values within [0, 1]."""
        return all(
            abs(a.entropy - b.entropy) < sum(bound(unit) for unit in (a, b))
            for a, b in zip(one.units, other.units, strict=True)
        )

    def bound(unit: UnitResult) -> float:
        variance = torch.tensor((unit.entropy_error / most) ** 2 * config.sequences)
        return most * bernstein(variance, config.sequences, level).item()

    assert agree(*pair)
    assert not agree(pair[1], warmer)


def test_a_form_that_is_zero_lets_everything_pass() -> None:
    for estimator in ESTIMATORS:
        config = replace(TINY, pairs=((0.0, 0.0),), estimator=estimator)
        for unit in simulate(config).units:
            assert unit.exact is not None
            for profile in (unit.count, unit.conditional, unit.exact):
                assert profile.rho.tolist() == [1.0] * 6
            assert unit.entropy == pytest.approx(math.log(6), rel=1e-6)
            assert unit.eta == 0


def test_drawn_forms_have_the_spectrum_that_is_asked_for() -> None:
    for form in ("symmetric", "asymmetric"):
        config = replace(PANELS["random walk, Σ = I"], form=form, exact=False, sequences=2)
        for index, unit in enumerate(simulate(config).units):
            spectrum = form_of(config, index).spectrum()
            assert unit.xi == pytest.approx(spectrum.xi.item(), rel=1e-12)
            assert unit.eta == pytest.approx(spectrum.eta.item(), rel=1e-12)
            # mean² + scale² within six standard deviations of 128 (or 128²) squared normals
            norm = (unit.eta**2 * config.model - 128 * unit.mean**2) / 128
            spread = 6 * math.sqrt((2 * unit.scale**4 + 4 * (unit.mean * unit.scale) ** 2) / 128)
            assert norm == pytest.approx(unit.scale**2, abs=spread)


def test_the_error_of_a_count_is_binomial_and_that_of_an_average_its_spread() -> None:
    config = replace(TINY, draws=1, sequences=500, exact=False)
    plan = _Plan(config, config.token_process())
    unit = run_unit(plan, 0)
    generator = generator_of(config, "unit 0")
    weights = plan.draw_weights(0.5, 0.1, generator)
    _, chance = plan.draw((weights / math.sqrt(5)).float(), 500, generator)
    error = chance.double().std(0) / math.sqrt(500)
    assert unit.conditional.standard_error is not None
    torch.testing.assert_close(unit.conditional.standard_error, error, rtol=1e-6, atol=1e-9)
    rho, error = unit.count.rho, unit.count.standard_error
    assert error is not None
    torch.testing.assert_close(error, (rho * (1 - rho) / 500).sqrt(), rtol=0.02, atol=2e-3)
    (certain,) = simulate(replace(config, pairs=((0.0, 0.0),))).units
    assert certain.count.standard_error is not None
    middle = 500.5 / 501  # all gates were open, and yet the error is not zero
    expected = torch.full((6,), math.sqrt(middle * (1 - middle) / 500), dtype=torch.float64)
    torch.testing.assert_close(certain.count.standard_error, expected)


# One result, whatever computes it


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", ["random walk, anisotropic Σ", "random walk, asymmetric W_QK"])
def test_workers_threads_and_order_leave_every_bit(name: str, estimator: Estimator) -> None:
    config = replace(
        PANELS[name], sequences=50, draws=2, estimator=estimator, pairs=((0.5, 0.1), (0.0, 0.5))
    )
    expected = bits(simulate(config, workers=1))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert bits(simulate(config, workers=2)) == expected
    finally:
        torch.set_num_threads(before)
    plan = _Plan(config, config.token_process())
    backwards = {index: run_unit(plan, index).to_dict() for index in reversed(range(config.units))}
    assert [backwards[index] for index in range(config.units)] == expected


def test_a_seed_decides_and_streams_differ() -> None:
    first, again, other = (simulate(replace(TINY, seed=seed)) for seed in (0, 0, 1))
    assert bits(first) == bits(again)
    rhos = [unit.conditional.rho for run in (first, other) for unit in run.units]
    assert len({tuple(rho.tolist()) for rho in rhos}) == len(rhos)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster with two workers; its address."""
    import ray

    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield context.address_info["address"]
    ray.shutdown()


@pytest.mark.distributed
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_ray_leaves_every_bit(cluster: str, estimator: Estimator) -> None:
    for config in PANELS.values():
        config = replace(config, draws=1, pairs=((0.5, 0.1), (0.0, 0.5)), estimator=estimator)
        assert bits(simulate(config, engine="ray")) == bits(simulate(config, workers=2))


@pytest.mark.distributed
def test_a_killed_ray_worker_leaves_every_bit(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bits(simulate(TINY))

    def slow(plan: Any, index: int) -> Any:
        (tmp_path / f"{index} {os.getpid()}").touch()
        time.sleep(0.5)
        from locater.simulation import run_unit  # the worker's own, which nobody has replaced

        return run_unit(plan, index)

    def attempts() -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for path in tmp_path.iterdir():
            unit, pid = map(int, path.name.split())
            found.setdefault(unit, set()).add(pid)
        return found

    done: list[int] = []
    killed: dict[int, int] = {}

    def report(count: int, total: int) -> None:
        done.append(count)
        deadline = time.monotonic() + 30
        while count == 2 and not killed:  # a unit that began while we looked is half a second long
            before = set(attempts())
            while set(attempts()) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            (unit,) = list(set(attempts()) - before)[:1]
            (pid,) = attempts()[unit]
            os.kill(pid, signal.SIGKILL)
            killed[unit] = pid

    monkeypatch.setattr("locater.simulation.run_unit", slow)
    simulation = simulate(TINY, engine="ray", report=report)
    assert bits(simulation) == expected
    assert done == list(range(TINY.units + 1))
    ((unit, pid),) = killed.items()
    assert attempts()[unit] > {pid}  # run again, by another process
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.distributed
def test_the_command_joins_a_running_cluster(cluster: str, tmp_path: Path) -> None:
    command = [*COMMAND, "--sequences", "50", "--store", str(tmp_path / "ray"), "--json"]
    done = subprocess.run(
        [*command, "--engine", "ray", "--ray-address", cluster], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    config = replace(command_config(), sequences=50)
    assert json.loads(done.stdout)["random walk, Σ = I"]["units"] == bits(simulate(config))


# Interruption


COMMAND = [sys.executable, "-m", "locater.cli", "simulate", "fig5", "--panels", "Σ = I"]
COMMAND += ["--means", "0.5", "--scales", "0.1", "0.5", "--draws", "4", "--estimator", "count"]


def command_config() -> SimulateConfig:
    pairs = ((0.5, 0.1), (0.5, 0.5))
    return replace(PANELS["random walk, Σ = I"], draws=4, pairs=pairs, estimator="count")


def stored(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every finished unit."""
    paths = folder.glob("simulate-*/unit-*.json")
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def test_a_killed_process_goes_on_where_it_was(tmp_path: Path) -> None:
    config = replace(command_config(), sequences=8_000)  # about a third of a second for each unit
    command = [*COMMAND, "--sequences", "8000", "--workers", "1", "--store", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(stored(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = stored(tmp_path)
    assert 3 <= len(before) < config.units
    done: list[int] = []
    resumed = simulate(config, store=tmp_path, report=lambda count, total: done.append(count))
    assert done == list(range(len(before), config.units + 1))
    after = stored(tmp_path)
    assert len(after) == config.units
    assert {name: after[name] for name in before} == before
    assert bits(resumed) == bits(simulate(config, workers=2))


def test_what_cannot_be_read_is_computed_again(tmp_path: Path) -> None:
    expected = bits(simulate(TINY, store=tmp_path))
    (folder,) = tmp_path.iterdir()
    first, *others = sorted(folder.glob("unit-*.json"))
    whole = first.read_bytes()
    other = json.loads(whole)
    del other["kept"]["entropy"]
    wrong = [b"", whole[:-1], b"\xff\xfe garbage", b"[]", json.dumps(other).encode()]
    for path, data in zip(others, wrong, strict=True):
        path.write_bytes(data)
    before, done = stored(tmp_path), []
    again = simulate(TINY, store=tmp_path, report=lambda count, total: done.append(count))
    assert bits(again) == expected
    assert done[0] == 1
    assert stored(tmp_path)[first.name] == before[first.name]
    assert bits(simulate(TINY, store=tmp_path)) == expected


def edited(unit: dict[str, Any]) -> None:
    unit["conditional"][0] = 0.25


def shortened(unit: dict[str, Any]) -> None:
    unit["count"].pop()


def renamed(unit: dict[str, Any]) -> None:
    unit["mean"] = 7.0


@pytest.mark.parametrize("edit", [edited, shortened, renamed])
def test_an_edited_unit_is_never_taken_for_a_result(
    edit: Callable[[dict[str, Any]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the program: it is said, simulated again, and the answer is the first one."""
    command = ["simulate", "--panels", "Σ = I", "--draws", "2", "--sequences", "20", "--model", "5",
               "--tokens", "6", "--workers", "1", "--json", "--store", str(tmp_path)]  # fmt: skip
    assert main(command) == 0
    first = capsys.readouterr()
    assert not first.err
    path, other = sorted(tmp_path.glob("*/unit-*.json"))[:2]
    data = json.loads(path.read_text())
    edit(data.get("kept", data))
    path.write_text(json.dumps(data))
    assert main(command) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert f"{path} is not what was stored there" in again.err
    path.write_bytes(other.read_bytes())  # whole, but of another draw
    assert main(command) == 0
    swapped = capsys.readouterr()
    assert swapped.out == first.out and str(path) in swapped.err


def test_other_settings_and_tokens_have_other_units(tmp_path: Path) -> None:
    simulate(TINY, store=tmp_path)
    changes: tuple[dict[str, Any], ...] = ({"seed": 1}, {"sequences": 41}, {"phi": 0.8})
    for change in changes:
        simulate(replace(TINY, **change), store=tmp_path)
    simulate(TINY, process=own_process(0), store=tmp_path)
    simulate(TINY, process=replace(own_process(0), mean=None), store=tmp_path)
    folders = list(tmp_path.iterdir())
    assert len(folders) == 6
    for folder in folders:
        assert json.loads((folder / "config.json").read_text())["tokens"] == 6
        assert len(list(folder.glob("unit-*.json"))) == TINY.units


# Bounded memory


MEASURE = """
import os, sys
from dataclasses import replace
from pathlib import Path
from locater.simulation import SimulateConfig, simulate

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])

for case in sys.argv[2:]:
    if os.fork():  # each in a process of its own, after one import for all
        assert os.wait()[1] == 0
        continue
    sequences, memory = map(int, case.split())
    config = SimulateConfig(draws=1, pairs=((0.5, 0.1),), exact=False, memory=memory,
                            estimator=sys.argv[1], sequences=2)
    simulate(config, workers=1)  # whatever is loaded once is loaded now
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = kilobytes("VmRSS")
    simulate(replace(config, sequences=sequences), workers=1)
    print((kilobytes("VmHWM") - before) / 1024, flush=True)
    os._exit(0)
"""


def peak_growth(estimator: Estimator, *cases: tuple[int, int]) -> list[float]:
    """Megabytes by which simulations make a fresh process grow at its peak."""
    words = [f"{sequences} {memory}" for sequences, memory in cases]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, estimator, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(line) for line in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_memory_is_bounded_by_the_setting_and_not_by_the_sequences(estimator: Estimator) -> None:
    """A block fits the setting; the allocator may keep what it freed of the last one, no more."""
    config = SimulateConfig(memory=16, estimator=estimator)
    block = _Plan(config, config.token_process()).block
    cases = ((2 * block, 16), (32 * block, 16), (32 * block, 64))
    # pages of libraries that come back meanwhile only add to what is counted: the least of three
    counts = [peak_growth(estimator, *cases) for _ in range(3)]
    few, many, wide = (min(one) for one in zip(*counts, strict=True))
    numbers = config.tokens * config.model if estimator == "count" else config.tokens + config.model
    needed = 32 * block * numbers * 4 / 2**20  # the noise alone, if all of it were held at once
    assert needed > 2 * 16
    assert many <= 2 * 16
    assert abs(many - few) <= 16
    assert wide > 16  # the setting is what decides


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": 0}, "sequences must be at least 2, got 0"),
        ({"tokens": 1}, "tokens must be at least 2, got 1"),
        ({"model": 0}, "model must be at least 1, got 0"),
        ({"draws": 0}, "draws must be at least 1, got 0"),
        ({"memory": 0}, "memory must be at least 1, got 0"),
        ({"form": "round"}, "unknown form 'round'.\nhint: choose one of: symmetric, asymmetric."),
        ({"covariance": "x"}, "unknown covariance 'x'"),
        ({"process": "x"}, "unknown process 'x'.\nhint: .*random-walk, autoregressive, indep"),
        ({"estimator": "x"}, "unknown estimator 'x'.\nhint: .*conditional, count"),
        ({"pairs": ()}, r"pairs must be .* got \(\)"),
        ({"pairs": ((0.5, -0.1),)}, r"scales of zero or more, got \(\(0.5, -0.1\)"),
        ({"pairs": ((math.nan, 0.1),)}, "got .*nan"),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    change: dict[str, Any], message: str, unchecked: None
) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulateConfig(**change)


def test_a_preset_that_does_not_exist_is_refused(unchecked: None) -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown preset 'fig6'.\nhint: did you mean fig5\? choose one of: fig5, fig5",
    ):
        preset("fig6")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda process: replace(process.truncate(5), mean=None),
            "process has 5 tokens in 5 dim.*\nhint: .*say 6 tokens",
        ),
        (
            lambda process: replace(process, covariance=None, mean=torch.zeros(6, 4)),
            "the process has 6 tokens in 4 dimensions",
        ),
        (
            lambda process: replace(process, covariance=torch.eye(4).double(), mean=None),
            "covariance is .4, 4., expected 5 x 5",
        ),
        (
            lambda process: replace(process, covariance=torch.diag(torch.arange(5.0)).double()),
            "the means leave the space in which the covariance lets tokens vary.\nhint: .*rank",
        ),
    ],
)
def test_tokens_that_do_not_fit_are_refused_before_any_work(
    change: Callable[[TokenProcess], TokenProcess],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("locater.simulation.run_unit", None)
    with pytest.raises((ConfigError, InputError), match=message):
        simulate(TINY, process=change(own_process(0)), store=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_pair_that_was_not_simulated_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"\(0.5, 0.2\) was not simulated.\nhint: the pairs: .*0.1"
    ):
        simulate(replace(TINY, exact=False)).mean_profile(0.5, 0.2)


def test_exact_profiles_that_were_not_computed_are_not_invented() -> None:
    simulation = simulate(replace(TINY, exact=False))
    with pytest.raises(ConfigError, match=r"exact profiles were not computed.\nhint: .*exact=True"):
        simulation.mean_profile(0.5, 0.1, "exact")
    assert "count_gap" not in simulation.summary()[0]


def test_a_store_that_cannot_be_written_is_reported_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "file"
    place.write_text("here")
    monkeypatch.setattr("locater.simulation.run_unit", None)
    with pytest.raises(LocaterError, match=r"cannot write .*\nhint: choose another place"):
        simulate(TINY, store=place)
    assert place.read_text() == "here"


def test_a_full_disk_loses_nothing_that_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 6  # the settings and two units, each with its folder

    def sync(_: int) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", sync)
        with pytest.raises(LocaterError, match=r"No space left on device.*\nhint: .*make room"):
            simulate(TINY, store=tmp_path)
    before = stored(tmp_path)
    assert len(before) == 2
    assert not list(tmp_path.glob("*/.*"))  # no rubbish
    done: list[int] = []
    resumed = simulate(TINY, store=tmp_path, report=lambda count, total: done.append(count))
    assert done == [2, 3, 4, 5, 6]
    assert {name: stored(tmp_path)[name] for name in before} == before
    assert bits(resumed) == bits(simulate(TINY))


# What is reported


def test_means_over_draws_are_those_of_the_units() -> None:
    simulation = simulate(TINY)
    units = simulation.of_pair(0.5, 0.1)
    assert [unit.draw for unit in units] == [0, 1, 2]
    for source in ("count", "conditional", "exact"):
        profile = simulation.mean_profile(0.5, 0.1, source)
        rho = torch.stack([getattr(unit, source).rho for unit in units])
        torch.testing.assert_close(profile.rho, rho.mean(0))
        torch.testing.assert_close(profile.standard_error, rho.std(0) / math.sqrt(3))
    entropy, error = simulation.mean_entropy(0.5, 0.1)
    values = torch.tensor([unit.entropy for unit in units], dtype=torch.float64)
    assert entropy == pytest.approx(values.mean().item())
    assert error == pytest.approx(values.std().item() / math.sqrt(3))
    rows = simulation.summary()
    assert [(row["mean"], row["scale"]) for row in rows] == list(TINY.pairs)
    exact = simulation.mean_profile(0.5, 0.1, "exact")
    assert rows[0]["peak"] == exact.peak.item()
    gap = simulation.mean_profile(0.5, 0.1, "count").rho - exact.rho
    assert rows[0]["count_gap"] == gap.abs().max().item()


def test_one_draw_carries_the_error_of_its_own_samples() -> None:
    simulation = simulate(replace(TINY, draws=1))
    (unit,) = simulation.of_pair(0.0, 0.5)
    profile = simulation.mean_profile(0.0, 0.5)
    assert profile.standard_error is unit.conditional.standard_error
    assert simulation.mean_entropy(0.0, 0.5) == (unit.entropy, unit.entropy_error)


def test_units_survive_json_to_the_last_bit() -> None:
    for exact in (True, False):
        for unit in simulate(replace(TINY, exact=exact)).units:
            data = unit.to_dict()
            assert UnitResult.from_dict(json.loads(json.dumps(data))).to_dict() == data


@pytest.mark.paper("Fig. 5")
def test_presets_are_the_paper_s_setting() -> None:
    for name, sequences in (("fig5", 300), ("fig5-precise", 100_000)):
        panels = preset(name)  # type: ignore[arg-type]
        walk, anisotropic = list(panels.values())[:2]
        assert (walk.tokens, walk.model, walk.draws, walk.sequences) == (40, 128, 10, sequences)
        assert (walk.covariance, anisotropic.covariance) == ("isotropic", "anisotropic")
        assert {panel.pairs for panel in panels.values()} == {walk.pairs}
    covariance = anisotropic.token_process().covariance
    assert covariance is not None
    # Rᵀ R/d with R uniform in [-2.5, 2.5] has E tr/d = 25/12, of 128² numbers
    assert covariance.trace().item() / 128 == pytest.approx(25 / 12, rel=0.05)
