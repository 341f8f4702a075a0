"""Many runs: settings × seeds, each once, on this machine's cores or on a Ray cluster."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import torch

from locater.engines import Engine, run_units
from locater.errors import ConfigError, InputError, LocaterError
from locater.paper.lab.batches import load_material
from locater.paper.lab.presets import CONFIRMATION, READINGS, Setting, Sweep
from locater.paper.lab.run import DivergedError, Run, RunFolder
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.summary import chosen

RETRIES = 3
"""How often a run whose process died is taken up again."""
Report = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class SweepFolders:
    """Where runs are made, where their data lies, and where their results are published."""

    out: Path
    data: str = "embedded"
    results: Path | None = None

    def finished(self, config: TrainConfig) -> Run | None:
        """The run of these settings, if it has come to its end."""
        found = None
        published = self.results / f"{config.digest}.jsonl" if self.results is not None else None
        if published is not None and published.exists():
            found = Run.load(published)
        elif (self.out / config.digest / "config.json").exists():
            folder = RunFolder(self.out / config.digest, is_writer=False)
            found = folder.finished()
            if found is None and folder.load().has_diverged:
                found = folder.load()
        return found if found and found.final is not None and found.config == config else None

    def ended(self, sweep: Sweep) -> dict[str, Run]:
        """Those runs of a sweep that have come to their end, by digest; nothing is trained."""
        runs = (self.finished(config) for config in sweep.configs())
        return {run.config.digest: run for run in runs if run is not None}


def run_sweep(
    configs: Sequence[TrainConfig],
    folders: SweepFolders,
    *,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    checkpoint_every: int = 500,
    trackers: Sequence[str] = (),
    report: Report = lambda done, total: None,
) -> list[Run]:
    """Train what is not finished yet and return all runs, in the order of the settings.

    A run is named by the digest of its settings: equal settings are one run, whichever sweep asks.
    One that was interrupted goes on from its checkpoint; one that diverged is a result too.
    """
    wanted = {config.digest: config for config in configs}
    found = {digest: run for digest, c in wanted.items() if (run := folders.finished(c))}
    if len(found) < len(wanted):
        _check_corpus(found.values(), folders.data)
    todo = [config for digest, config in wanted.items() if digest not in found]
    if todo:
        import_module("locater.paper.lab.train")  # what is missing is said before workers start
    report(len(found), len(wanted))
    job = _Job(folders.out, folders.data, checkpoint_every, tuple(trackers), tuple(todo))
    local = _Processes(job) if engine == "local" else None
    try:
        for unit, run in run_units(
            local or job,
            range(len(todo)),
            engine=engine,
            workers=workers or (torch.cuda.device_count() if engine == "local" else 0) or None,
            ray_address=ray_address,
            gpus=1 if torch.cuda.is_available() else 0,
        ):
            found[todo[unit].digest] = run
            if folders.results is not None:
                run.export(folders.results)
            report(len(found), len(wanted))
    finally:
        if local is not None:
            local.close()
    if folders.results is not None:
        for run in found.values():
            if not (folders.results / f"{run.config.digest}.jsonl").exists():
                run.export(folders.results)
    return [found[config.digest] for config in configs]


def confirmed(
    sweep: Sweep, train: Callable[[Sweep], Mapping[str, Run]], *, seeds: int
) -> tuple[Sweep, Mapping[str, Run]]:
    """Every method at the point of the grid that suits it best, with fresh seeds.

    A method whose best learning rate is at an end of its grid gets a rate beyond it, twice or half
    as large, until it is not, or five times.
    """
    last = CONFIRMATION + seeds
    if sweep.first_seed < last and sweep.first_seed + sweep.seeds > CONFIRMATION:
        raise ConfigError(
            f"seeds {sweep.first_seed} to {sweep.first_seed + sweep.seeds - 1} would choose and "
            f"{CONFIRMATION} to {last - 1} judge: none may do both.",
            hint="give another --first-seed, or fewer --seeds.",
        )
    runs = dict(train(sweep))
    for _ in range(5):
        wider = _widened(sweep, chosen(sweep, runs))
        if wider is None:
            break
        sweep, runs = wider, {**runs, **train(wider)}
    best = chosen(sweep, runs)
    for method in _at_ends(sweep, best):  # still, after five rates more
        label = f"{best[method].label} (end of the grid)"
        best[method] = replace(best[method], label=label)
    fresh = replace(
        sweep,
        name=f"{sweep.name}-confirmed",
        settings=tuple(replace(setting, group="") for setting in best.values()),
        seeds=seeds,
        first_seed=CONFIRMATION,
    )
    return fresh, train(fresh)


def _widened(sweep: Sweep, best: Mapping[str, Setting]) -> Sweep | None:
    """The sweep with a point more for each method that is best at an end; None if none is."""
    more = []
    for method, rate in _at_ends(sweep, best).items():
        where, setting = f"learning_rate = {rate:g}", best[method]
        more.append(
            replace(
                setting,
                label=f"{where}, {READINGS.get(method, method)}",
                config=replace(setting.config, learning_rate=rate),
                group=where,
            )
        )
    return replace(sweep, settings=(*sweep.settings, *more)) if more else None


def _at_ends(sweep: Sweep, best: Mapping[str, Setting]) -> dict[str, float]:
    """The methods that are best at an end of their grid, and the learning rate beyond it."""
    found = {}
    for method, setting in best.items():
        rates = sorted({s.config.learning_rate for s in sweep.settings if s.method == method})
        rate = setting.config.learning_rate
        if len(rates) > 1 and rate in (rates[0], rates[-1]):
            found[method] = rate * 2 if rate == rates[-1] else rate / 2
    return found


def _check_corpus(runs: Iterable[Run], data: str) -> None:
    """Refuse to join runs of another text that goes by the same name."""
    for run in runs:
        corpus = load_material(run.config, data).corpus
        if run.environment.get("corpus", corpus) != corpus:
            raise InputError(
                f"run {run.config.digest} was trained on another text than {data}.",
                hint="give the same --data, or another --out and no --results.",
            )


@dataclass(frozen=True)
class _Job:
    """What a worker needs to know."""

    out: Path
    data: str
    checkpoint_every: int
    trackers: tuple[str, ...]
    configs: tuple[TrainConfig, ...]

    def __call__(self, unit: int) -> Run:
        """Train one of the settings, or go on with it."""
        from locater.paper.lab.train import train

        config = self.configs[unit]
        folder = self.out / config.digest
        try:
            return train(
                config,
                folder,
                data=self.data,
                checkpoint_every=self.checkpoint_every,
                trackers=self.trackers,
            )
        except DivergedError:
            return Run.load(folder)


@dataclass(eq=False)
class _Processes:
    """One process for each thread that asks; a process that dies is replaced."""

    job: _Job
    pools: dict[int, ProcessPoolExecutor] = field(default_factory=dict)
    places: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, unit: int) -> Run:
        thread = threading.get_ident()
        for _ in range(RETRIES):
            pool = self.pools.get(thread) or self._start(thread)
            try:
                return pool.submit(self.job, unit).result()
            except BrokenProcessPool:
                self.pools.pop(thread).shutdown(wait=False)
        raise LocaterError(
            f"the process of run {self.job.configs[unit].digest} died {RETRIES} times.",
            hint="memory may be short: use fewer --workers; run again to go on.",
        )

    def _start(self, thread: int) -> ProcessPoolExecutor:
        self.pools[thread] = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(next(self.places), os.getpid()),
        )
        return self.pools[thread]

    def close(self) -> None:
        """End the processes."""
        for pool in self.pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(place: int, parent: int) -> None:
    """A thread, and a GPU where there are some, for this process alone; it ends with its parent."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    if torch.cuda.device_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = str(place % torch.cuda.device_count())


def _end_with(parent: int) -> None:
    """Leave when the parent is gone, however it went: nobody is there to take a result."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
