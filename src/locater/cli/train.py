"""`locater train`: one model of the paper's, measured as it trains."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Suppress

from locater.cli.terminal import flag, parse, print_json, say, show, values
from locater.paper.lab.batches import corpus_name
from locater.paper.lab.presets import preset_named
from locater.paper.lab.run import Run
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.train import Progress, train
from locater.report.tables import Columns, terminal_table


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


def run(arguments: Sequence[str]) -> None:
    """Train, or go on with a run, then print what came out."""
    start = preset_named(flag("preset", arguments, TrainCommand.preset))
    default = TrainCommand(**values(TrainConfig, start))
    command = parse(TrainCommand, "train", arguments, default=default)
    corpus = corpus_name(command.data, command.task)
    config = TrainConfig(**values(TrainConfig, command) | {"corpus": corpus})
    with _bar(config.steps) as report:
        result = train(
            config,
            command.out,
            data=command.data,
            checkpoint_every=command.checkpoint_every,
            report=report,
            say=say,
        )
    if int(os.environ.get("RANK", "0")):
        return
    if command.json:
        print_json({"run": str(command.out), "digest": config.digest, "final": result.final})
    else:
        show(_layers(result))


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
