"""Sweeps repeat nothing, survive interruption and dead workers, and agree on every engine."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locater.errors import InputError
from locater.files import held
from locater.paper.lab import sweep as module
from locater.paper.lab.batches import _corpus
from locater.paper.lab.claims import published_table
from locater.paper.lab.presets import Setting, Sweep
from locater.paper.lab.run import Run
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.summary import Interval, markdown, summarize
from locater.paper.lab.sweep import SweepFolders, run_sweep
from locater.report.tables import update_page

BASE = TrainConfig(
    corpus="text.txt", dim=4, tokens=8, batch=2, steps=4, learning_rate=1e-2, measure_every=2
)
CONFIGS = [replace(BASE, seed=seed, mean_strength=m) for seed in (0, 1) for m in (0.0, 1.0)]


@pytest.fixture
def folders(tmp_path: Path) -> SweepFolders:
    generator = torch.Generator().manual_seed(0)
    lines = torch.randint(9, (60, 10), generator=generator).tolist()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join("abcdefghi"[word] for word in line) for line in lines))
    return SweepFolders(out=tmp_path / "runs", data=str(text), results=tmp_path / "results")


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting processes takes seconds; what is trained does not depend on them."""

    class Here:
        def __init__(self, job: module._Job) -> None:
            self.job = job

        def __call__(self, unit: int) -> Run:
            return self.job(unit)

        def close(self) -> None:
            pass

    monkeypatch.setattr(module, "_Processes", Here)


def test_an_interrupted_sweep_repeats_nothing(
    folders: SweepFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(CONFIGS, folders, workers=1, report=stop)
    made = {path: path.stat().st_mtime_ns for path in folders.out.glob("*/metrics.jsonl")}
    assert len(made) == 2
    seen: list[tuple[int, int]] = []
    runs = run_sweep([*CONFIGS, CONFIGS[0]], folders, workers=1, report=lambda *at: seen.append(at))
    assert seen == [(2, 4), (3, 4), (4, 4)]
    assert [run.config for run in runs] == [*CONFIGS, CONFIGS[0]]
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_published_results_are_enough_to_repeat_nothing(
    folders: SweepFolders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_this_process(monkeypatch)
    first = run_sweep(CONFIGS[:2], folders, workers=1)
    elsewhere = replace(folders, out=tmp_path / "new machine", data="nowhere/text.txt")
    again = run_sweep(CONFIGS[:2], elsewhere, workers=1)
    assert [run.records for run in again] == [run.records for run in first]
    assert not elsewhere.out.exists()


def test_a_run_that_diverged_is_a_result(
    folders: SweepFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    hot = replace(BASE, learning_rate=1e36, norm="none", steps=6)
    (run,) = run_sweep([hot], folders, workers=1)
    assert run.has_diverged
    assert folders.finished(hot) is not None


def test_runs_of_another_text_are_not_taken_for_this_one(
    folders: SweepFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    run_sweep(CONFIGS[:1], folders, workers=1)
    text = Path(folders.data)
    text.write_text(text.read_text().replace("a", "z"))
    _corpus.cache_clear()
    with pytest.raises(InputError, match="was trained on another text"):
        run_sweep(CONFIGS[:2], folders, workers=1)


def test_a_folder_without_settings_is_no_obstacle(
    folders: SweepFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    (folders.out / CONFIGS[0].digest).mkdir(parents=True)
    (run,) = run_sweep(CONFIGS[:1], folders, workers=1)
    assert run.final is not None


SCRIPT = """
import sys
from pathlib import Path
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.sweep import SweepFolders, run_sweep
if __name__ == "__main__":
    config = TrainConfig(corpus="text.txt", dim=4, tokens=8, batch=2, steps=10**7, measure_every=5)
    run_sweep([config], SweepFolders(out=Path(sys.argv[1]), data=sys.argv[2]), workers=2)
"""


def test_workers_end_when_their_parent_is_killed(
    folders: SweepFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(folders.out), folders.data]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(folders.out.glob("*/metrics.jsonl")):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.kill()
    process.wait()
    (run,) = folders.out.iterdir()
    monkeypatch.setattr("locater.files.PATIENCE", 60.0)
    with held(run):  # nobody else holds it any more: the worker is gone
        pass


def _die_once(self: module._Job, unit: int) -> Run:
    mark = self.out / "died"
    if not mark.exists():
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _call(self, unit)


_call = module._Job.__call__


class Mortal(module._Job):
    """A job whose first process is killed."""

    __call__ = _die_once


def test_a_process_that_dies_is_replaced_and_the_results_are_the_same(
    folders: SweepFolders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = replace(folders, out=tmp_path / "plain", results=None)
    with monkeypatch.context() as patch:
        in_this_process(patch)
        expected = run_sweep(CONFIGS[:2], plain, workers=1)
    monkeypatch.setattr(module, "_Job", Mortal)
    runs = run_sweep(CONFIGS[:2], folders, workers=2)
    assert (folders.out / "died").exists()
    assert [run.records for run in runs] == [run.records for run in expected]


@pytest.mark.slow
def test_ray_has_the_same_results(
    folders: SweepFolders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remote = replace(folders, out=tmp_path / "ray", results=None)
    runs = run_sweep(CONFIGS[:2], remote, engine="ray", workers=1)
    in_this_process(monkeypatch)
    here = run_sweep(CONFIGS[:2], folders, workers=1)
    assert [run.records for run in runs] == [run.records for run in here]


def fake(config: TrainConfig, loss: float) -> Run:
    end = "finished" if math.isfinite(loss) else "diverged"
    record = {
        "step": 4, "end": end, "whole_valid_loss": loss, "entropy": [3.0, 2.0], "trace": [1.0, 3.0],
        "frobenius_squared": [2.0, 2.0], "rho": [[1.0, 0.0]] * 2,
    }  # fmt: skip
    return Run(config, {}, [record])


def test_a_summary_pairs_seeds_and_says_what_is_beyond_doubt(tmp_path: Path) -> None:
    worse, same = replace(BASE, mean_strength=1.0), replace(BASE, mean_strength=2.0)
    settings = tuple(
        Setting(label=label, config=config)
        for label, config in (("none", BASE), ("worse", worse), ("same", same))
    )
    sweep = Sweep(name="trial", question="?", settings=settings, seeds=3)
    losses = {  # the seeds differ by far more than the settings
        "none": [4.0, 4.5, 5.0],
        "worse": [4.0 + math.log(1.02), 4.5 + math.log(1.02), 5.0 + math.log(1.021)],
        "same": [4.01, 4.5, math.nan],
    }
    runs = {
        (config := replace(setting.config, seed=seed)).digest: fake(config, loss)
        for setting in settings
        for seed, loss in enumerate(losses[setting.label])
    }
    none, bad, equal = summarize(sweep, runs)
    assert bad.verdict == "higher" and "1 with it diverged" in equal.verdict
    assert bad.change.mean == pytest.approx((2 + 2 + 2.1) / 3)
    assert (equal.diverged, equal.seeds, none.diverged) == (1, 3, 0)
    assert (none.entropy.mean, none.trace.mean, none.participation.mean) == (2.5, 2.0, 0.5)
    table = markdown([none, bad, equal])
    assert "1 of 3" in table and "| accuracy |" not in table and "2.03 ± 0.14" in table
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: trial -->\nold\n<!-- end -->\nafter\n")
    update_page(page, lambda name: f"new {name}\n")
    expected = "before\n<!-- results: trial -->\nnew trial\n<!-- end -->\nafter\n"
    assert page.read_text() == expected


def test_the_tables_of_the_guide_are_those_of_the_published_results() -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs" / "lab.md").read_text()
    marks = re.findall(r"<!-- results: (\S+) -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert marks
    for name, table in marks:
        # to mend it: locater sweep all --no-train --results results/lab --page docs/lab.md
        assert table == published_table(name, root / "results" / "lab"), name


def test_intervals_are_students() -> None:
    interval = Interval.of([1.0, 2.0, 3.0])
    assert (interval.mean, interval.half) == (2.0, pytest.approx(4.302653 / math.sqrt(3)))
    assert Interval.of([]).text() == "-" and Interval.of([1.0]).text() == "1.00"
