"""Training the paper's models: `locater train`, `locater sweep`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Suppress

from locater.cli.terminal import (
    EngineFlags,
    check_figure,
    flag,
    parse,
    print_json,
    progress,
    say,
    show,
    values,
)
from locater.errors import ConfigError
from locater.paper.lab.batches import corpus_name
from locater.paper.lab.presets import SWEEPS, Sweep, compared, grid_of, preset_named, sweep_named
from locater.paper.lab.run import Run
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.summary import markdown, summarize
from locater.paper.lab.sweep import SweepFolders, confirmed, run_sweep
from locater.report.tables import Columns, terminal_table, update_page

if TYPE_CHECKING:
    from locater.paper.lab.train import Progress


@dataclass(frozen=True, kw_only=True)
class TrainCommand(TrainConfig):
    """Train one model of the paper's laboratory; run again to go on where it stopped.

    The flags after the preset's name change its settings.  Under `accelerate launch` the
    processes share each batch.
    """

    corpus: Annotated[str, Suppress] = ""
    preset: str = "fig8-cpu"
    """Settings to start from: fig6 to fig12 and fig6-cpu to fig12-cpu without LocAteR;
    printed, swapped, printed-sum-normalized, swapped-sum-normalized with it, each also -cpu;
    modern (RMSNorm, rotary, SwiGLU, several heads); tiny."""
    data: str = "embedded"
    """The text: `embedded`, `hub:wikitext-2`, a folder with train, valid and test, or a file."""
    out: Path = Path("out/train")
    """The run's folder."""
    checkpoint_every: int = 500
    """Steps between two saves of the model."""
    json: bool = False
    """Print the last measurement as JSON."""


_TALK = (
    "loss {task.fields[loss]:.3f}  ppl {task.fields[ppl]:.1f}  entropy {task.fields[entropy]:.3f}  "
    "{task.fields[speed]:,.0f} tokens/s"
)


def do_train(arguments: Sequence[str]) -> None:
    """Train, or go on with a run, then print what came out."""
    from locater.paper.lab.train import train  # a sweep's published runs do without accelerate

    start = preset_named(flag("preset", arguments, TrainCommand.preset))
    default = TrainCommand(**values(TrainConfig, start))
    command = parse(TrainCommand, "train", arguments, default=default)
    corpus = corpus_name(command.data, command.task)
    config = TrainConfig(**values(TrainConfig, command) | {"corpus": corpus})
    is_first = not int(os.environ.get("RANK", "0"))
    unknown = dict.fromkeys(("loss", "ppl", "entropy"), math.nan)
    with progress(
        "", talk=_TALK, is_shown=is_first, total=config.steps, **unknown, speed=0.0
    ) as show_step:

        def report(at: Progress) -> None:
            seen = {"loss": at.loss, "entropy": at.entropy, "speed": at.tokens_per_second}
            seen["ppl"] = math.exp(min(at.loss, 50.0)) if math.isfinite(at.loss) else math.nan
            show_step(at.step, config.steps, **seen)

        result = train(
            config,
            command.out,
            data=command.data,
            checkpoint_every=command.checkpoint_every,
            report=report,
            say=say,
        )
    if not is_first:
        return
    if command.json:
        print_json({"run": str(command.out), "digest": config.digest, "final": result.final})
    else:
        show(_layers(result))


def _layers(result: Run) -> object:
    """What was measured last, layer by layer."""
    assert result.final is not None
    final, config = result.final, result.config
    columns: Columns = {
        "layer": str,
        **{
            title: lambda layer, name=name: f"{final[name][layer]:.3f}"  # type: ignore[misc]
            for title, name in (
                ("tr W", "trace"),
                ("‖W‖²", "frobenius_squared"),
                ("r = tr W/λ", "r"),
                ("entropy", "entropy"),
                ("rank", "rank"),
            )
        },
        "lowest ρ": lambda layer: f"{min(final['rho'][layer]):.2f}",
        "highest ρ": lambda layer: f"{max(final['rho'][layer]):.2f}",
    }
    perplexity = math.exp(final["whole_valid_loss"])
    title = f"{config.corpus}, step {final['step']}: valid perplexity {perplexity:.2f}"
    return terminal_table(range(config.layers), columns, title=title)


@dataclass(frozen=True, kw_only=True)
class SweepCommand(EngineFlags):
    """Train every setting of a sweep with every seed, each run once; then a table and a figure."""

    name: str = ""
    """May stand first, without --name: fig6 to fig12, fig6-cpu to fig12-cpu, fig6-quick and
    fig7-quick; of docs/protocol.md: passes-0.6, passes-0.6-fp32, passes-3, passes-3-others,
    passes-15, tuned, depth-3, depth-6, words, task-masked, task-digits, task-pre-ln, task-modern;
    normalization-cpu, ablation-cpu, target-cpu, covariance-cpu, architectures-cpu, rivals-cpu,
    rivals-hot-cpu, tiny; `all` for all that ends in -cpu."""
    data: str = ""
    """The text, as for `locater train`; by default the sweep's own from the hub."""
    out: Path = Path("out/lab")
    """Run folders are made here, named by the digest of their settings."""
    results: Path | None = None
    """Published results: looked into first, and finished runs are added."""
    grid: tuple[str, ...] = ()
    """Settings to try in place of a named sweep: learning_rate=5e-4,1e-3,2e-3, several with
    spaces between them; every method at every point."""
    methods: str = "none"
    """What is compared on the grid, separated by commas: none, printed, swapped, both also with
    -sum-normalized, sigma-reparam, qk-norm, qk-clip, soft-cap, qk-weight-decay."""
    preset: str = "fig6-cpu"
    """The settings that the grid changes, as for `locater train`."""
    confirm: int = 0
    """Then train each method at its best point with so many fresh seeds, and judge by those."""
    seeds: int | None = None
    """How many; by default the sweep's own number."""
    first_seed: int | None = None
    """The first of them; by default the sweep's own."""
    trackers: tuple[str, ...] = ()
    """Loggers of accelerate for every run: tensorboard, wandb, trackio and others."""
    train: bool = True
    """Train what is missing; with --no-train only what is finished is taken."""
    figure: Path | None = None
    """Draw the figure here: .html, .svg, .png, .pdf or .json."""
    page: Path | None = None
    """Write the tables of this page anew, between its marks, from --results."""
    json: bool = False
    """Print the table as JSON."""


def do_sweep(arguments: Sequence[str]) -> None:
    """Train what is missing, then print or draw."""
    command = parse(SweepCommand, "sweep", arguments, first="name")
    check_figure(command.figure)
    every = [name for name in SWEEPS if name.endswith("-cpu")]
    names = every if command.name == "all" else [command.name]
    sweeps = [_grid(command)] if command.grid else [sweep_named(name) for name in names]
    adapted = [_adapted(command, sweep) for sweep in sweeps]
    found = {sweep.name: (sweep, _runs(command, sweep)) for sweep in adapted}
    for sweep in adapted if command.confirm else ():  # again, with seeds that chose nothing
        fresh, runs = confirmed(sweep, lambda one: _runs(command, one), seeds=command.confirm)
        found[fresh.name] = fresh, runs
    if command.figure is not None:
        if len(found) > 1:
            raise ConfigError("one figure cannot show all sweeps.", hint="name one of them.")
        from locater.paper.lab.figures import lab_chart
        from locater.report.charts import save_chart

        (pair,) = found.values()
        say(f"wrote {save_chart(lab_chart(*pair), command.figure)}")
    if command.page is not None:
        from locater.paper.lab.claims import published_table

        results = command.results or command.out
        say(f"wrote {update_page(command.page, lambda name: published_table(name, results))}")
    if command.json:
        print_json({name: _rows(*pair) for name, pair in found.items()})
    elif command.figure is None and command.page is None:
        for sweep, runs in found.values():
            print(f"{sweep.question}\n\n{markdown(summarize(sweep, runs))}")


def _adapted(command: SweepCommand, sweep: Sweep) -> Sweep:
    """The sweep on the text and with the seeds that were asked for."""
    settings = sweep.settings
    if command.data:
        corpora = [corpus_name(command.data, one.config.task) for one in settings]
        settings = tuple(
            replace(one, config=replace(one.config, corpus=corpus))
            for one, corpus in zip(settings, corpora, strict=True)
        )
    first = sweep.first_seed if command.first_seed is None else command.first_seed
    return replace(sweep, settings=settings, seeds=command.seeds or sweep.seeds, first_seed=first)


def _grid(command: SweepCommand) -> Sweep:
    """The sweep that --grid and --methods describe."""
    if command.name:
        raise ConfigError(
            f"--grid makes a sweep of its own, and {command.name} is another.",
            hint="leave the name out; --preset says what the grid changes.",
        )
    return compared(
        "grid",
        f"{command.preset} on a grid of {', '.join(command.grid)}",
        preset_named(command.preset),
        command.methods.split(","),
        grid=grid_of(command.grid),
        seeds=3,
        first_seed=0,
    )


def _runs(command: SweepCommand, sweep: Sweep) -> Mapping[str, Run]:
    own = sweep.settings[0].config.corpus
    data = command.data or (own if own in ("embedded", "digits") else f"hub:{own}")
    folders = SweepFolders(out=command.out, data=data, results=command.results)
    if not command.train:
        return folders.ended(sweep)
    with progress(sweep.name) as report:
        runs = run_sweep(
            sweep.configs(),
            folders,
            trackers=command.trackers,
            report=report,
            **values(EngineFlags, command),
        )
    return {run.config.digest: run for run in runs}


def _rows(sweep: Sweep, runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    rows = []
    for row in summarize(sweep, runs):
        data = asdict(row)
        data["setting"] = row.setting.label
        rows.append({**data, "settings": row.setting.config.changes(), "verdict": row.verdict})
    return rows
