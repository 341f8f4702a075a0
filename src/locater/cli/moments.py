"""`locater moments`: what a text gives of every head, in a small file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from locater.cli.probe import OnText
from locater.cli.terminal import parse, progress, say
from locater.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MomentsCommand(OnText):
    """Keep the moments of every head's queries and keys, for `locater what-if` to answer from."""

    out: Path | None = Path("moments.safetensors")
    """The file to write."""
    layers: str | None = None
    """Only attentions whose name this regular expression finds."""
    batch: int = 16
    """Blocks that run together."""
    adapter: str = ""
    """Keep also what a LoRA adapter (a folder or hub id, as PEFT saves it) would make of them."""


def run(arguments: Sequence[str]) -> None:
    """Run the model on the text and write the file."""
    command = parse(MomentsCommand, "moments", arguments, first="model")
    if command.out is None or command.out.suffix != ".safetensors":
        raise ConfigError(f"--out is {command.out}.", hint="moments.safetensors is usual.")
    from locater.reality.what_if import moments

    model, blocks = command.load()
    with progress("layers") as report:
        found = moments(
            model, blocks, name=command.model, layers=command.layers, batch=command.batch,
            adapter=command.adapter, report=report,
        )  # fmt: skip
    path = found.save(command.out)
    size = path.stat().st_size / 1e6
    say(f"wrote {path}: {sum(map(len, found.layers))} heads, {size:.1f} MB.")
