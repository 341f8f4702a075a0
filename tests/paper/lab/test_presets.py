"""The presets are the paper's settings, and the CPU's differ where they say so."""

from dataclasses import asdict

import pytest

from locater.errors import ConfigError
from locater.paper.lab.presets import (
    KAPPAS,
    PRESETS,
    SWEEPS,
    base,
    preset_named,
    sweep_named,
    with_locater,
)
from locater.paper.lab.settings import TrainConfig

FIGURES = {"fig6": (128, 1), "fig7": (128, 1), "fig8": (32, 1), "fig9": (32, 3), "fig10": (32, 6),
           "fig11": (128, 3), "fig12": (128, 6)}  # fmt: skip


@pytest.mark.paper("Section 7, Appendix D")
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_at_full_size_has_the_papers_settings(name: str) -> None:
    config = PRESETS[name]
    assert (config.dim, config.layers) == FIGURES[name]
    assert (config.tokens, config.batch, config.steps) == (64, 64, 50_000)
    assert config.learning_rate == (2.5e-5 if config.dim == 128 else 1e-4)
    assert (config.weight_decay, config.norm, config.vocabulary) == (0.01, "post", "word")
    assert config.corpus == "wikitext-2" and config.vocabulary_size is None
    assert {s.kappa for s in SWEEPS["fig6"].settings} == {None, *KAPPAS}


@pytest.mark.parametrize("name", FIGURES)
def test_the_cpu_changes_only_what_it_says(name: str) -> None:
    full, small = asdict(PRESETS[name]), asdict(PRESETS[f"{name}-cpu"])
    changed = {key for key in full if full[key] != small[key]}
    assert changed == {"vocabulary", "vocabulary_size", "batch", "steps", "learning_rate",
                       "measure_every", "predict_every"}  # fmt: skip
    paper = full["steps"] * full["learning_rate"]
    assert small["steps"] * small["learning_rate"] == pytest.approx(paper)


def test_readings_give_the_strengths_their_roles() -> None:
    config = base()
    printed, swapped = (with_locater(config, name, 0.1) for name in ("printed", "swapped"))
    assert (printed.scale_strength, printed.mean_strength) == (100.0, 0.1)
    assert (swapped.scale_strength, swapped.mean_strength) == (0.1, 100.0)
    for size in (base(), base(32, cpu=True)):  # the same effective strength at every batch
        penalty = with_locater(size, "swapped-sum-normalized", 0.1).penalty
        assert penalty is not None
        assert penalty.mean_strength == pytest.approx(100 / 4096)
        assert penalty.scale_strength == pytest.approx(0.1 / 4096)


def test_every_sweep_has_its_baseline_and_no_setting_twice() -> None:
    for name, sweep in SWEEPS.items():
        assert sweep.name == name
        digests = [config.digest for config in sweep.configs()]
        assert len(set(digests)) == len(digests) == sweep.seeds * len(sweep.settings)
        groups = {setting.group for setting in sweep.settings}
        baselines = [s for s in sweep.settings if s.label.endswith("none")]
        assert {s.group for s in baselines} == groups
        assert all(setting.config.penalty is None for setting in baselines)
    assert all(SWEEPS[f"{name}-cpu"].seeds >= 3 for name in ("fig6", "fig7", "rivals", "target"))


def test_fig_7_needs_no_run_that_fig_6_has_not() -> None:
    ours, theirs = ({c.digest for c in SWEEPS[name].configs()} for name in ("fig7-cpu", "fig6-cpu"))
    assert ours < theirs


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'fig5'[\s\S]*fig6-cpu"):
        preset_named("fig5")
    with pytest.raises(ConfigError, match=r"unknown sweep 'fig5'[\s\S]*rivals-hot-cpu"):
        sweep_named("fig5")
    assert isinstance(preset_named("printed-cpu"), TrainConfig)
