"""`locater train`: one model of the paper's, measured as it trains."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from locater.cli.terminal import console, print_json, say

if TYPE_CHECKING:
    from locater.paper.lab.run import Run
    from locater.paper.lab.settings import TrainConfig
    from locater.paper.lab.train import Progress


def run(arguments: Sequence[str]) -> None:
    """Train, or go on with a run, then print what came out."""
    from dataclasses import asdict, dataclass, fields

    from locater.paper.lab.batches import corpus_name
    from locater.paper.lab.presets import preset_named
    from locater.paper.lab.settings import TrainConfig

    @dataclass(frozen=True, kw_only=True)
    class Train(TrainConfig):
        """Train one model of the paper's laboratory; run again to go on where it stopped.

        The flags after the preset's name change its settings.  Under `accelerate launch` the
        processes share each batch.
        """

        corpus: Annotated[str, tyro.conf.Suppress] = ""
        preset: str = "fig8-cpu"
        """Settings to start from: fig6 to fig12 and fig6-cpu to fig12-cpu without LocAteR;
        printed, swapped, printed-sum-normalized, swapped-sum-normalized with it, each also -cpu;
        tiny."""
        data: str = "embedded"
        """The text: `embedded`, `hub:wikitext-2`, a folder with train, valid and test, or a
        file."""
        out: Path = Path("out/train")
        """The run's folder."""
        checkpoint_every: int = 500
        json: bool = False
        """Print the last measurement as JSON."""

    start = asdict(preset_named(_preset(arguments)))
    command = tyro.cli(Train, prog="locater train", args=list(arguments), default=Train(**start))
    values = {f.name: getattr(command, f.name) for f in fields(TrainConfig)}
    values["corpus"] = corpus_name(command.data, command.task)
    config = TrainConfig(**values)
    result = _train(config, command.out, command.data, command.checkpoint_every)
    if int(os.environ.get("RANK", "0")):
        return
    if command.json:
        print_json({"run": str(command.out), "digest": config.digest, "final": result.final})
    else:
        _print(result)


def _preset(arguments: Sequence[str]) -> str:
    """The preset that is asked for, before the other flags can be read."""
    for place, argument in enumerate(arguments):
        if argument == "--preset" and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith("--preset="):
            return argument.removeprefix("--preset=")
    return "fig8-cpu"


def _train(config: TrainConfig, out: Path, data: str, checkpoint_every: int) -> Run:
    from locater.paper.lab.train import train

    with _bar(config.steps) as report:
        return train(
            config, out, data=data, checkpoint_every=checkpoint_every, report=report, say=say
        )


@contextmanager
def _bar(steps: int) -> Iterator[Callable[[Progress], None]]:
    """Steps, loss, perplexity, entropy, tokens per second and the time left, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.progress import TimeRemainingColumn as TimeLeft

    screen = Console(stderr=True)
    talk = TextColumn("loss {task.fields[loss]:.3f}  ppl {task.fields[ppl]:.1f}  entropy "
                      "{task.fields[entropy]:.3f}  {task.fields[speed]:,.0f} tokens/s")  # fmt: skip
    columns = (BarColumn(), MofNCompleteColumn(), talk, TimeLeft())
    is_shown = screen.is_terminal and not int(os.environ.get("RANK", "0"))
    with Bars(*columns, console=screen, disable=not is_shown) as bar:
        task = bar.add_task(
            "train", total=steps, loss=math.nan, ppl=math.nan, entropy=math.nan, speed=0.0
        )

        def report(at: Progress) -> None:
            bar.update(
                task,
                completed=at.step,
                loss=at.loss,
                ppl=math.exp(min(at.loss, 50.0)) if math.isfinite(at.loss) else math.nan,
                entropy=at.entropy,
                speed=at.tokens_per_second,
            )

        yield report


def _print(result: Run) -> None:
    from rich.table import Table

    assert result.final is not None
    final, config = result.final, result.config
    table = Table("layer", "tr W", "‖W‖²", "r = tr W/λ", "entropy", "rank", "lowest ρ", "highest ρ")
    perplexity = math.exp(final["whole_valid_loss"])
    table.title = f"{config.corpus}, step {final['step']}: valid perplexity {perplexity:.2f}"
    table.title_justify = "left"
    for column in table.columns:
        column.justify = "right"
    for layer in range(config.layers):
        names = ("trace", "frobenius_squared", "r", "entropy", "rank")
        values = [f"{final[name][layer]:.3f}" for name in names]
        rho = final["rho"][layer]
        table.add_row(str(layer), *values, f"{min(rho):.2f}", f"{max(rho):.2f}")
    console().print(table)
