"""Running a model on a text, and what its heads do there: `locater probe`, `moments`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from locater.cli.terminal import check_figure, parse, plain, print_json, progress, say, show
from locater.errors import ConfigError, LocaterError
from locater.files import DEMO, packaged


def text_of(model: str, text: Path | None) -> Path:
    """The text that was given; the model demo brings its own."""
    if text is None and packaged(model) != DEMO:
        raise ConfigError("no text is given.", hint="add --text FILE, a plain text.")
    return text or DEMO / "text.txt"


@dataclass(frozen=True, kw_only=True)
class OnText:
    """A model, a text to run it on, and where the answer goes."""

    model: str
    """May stand first, without --model: a folder, a GGUF file, a hub id, or demo (extra `hf`)."""
    text: Path | None = None
    """A plain text; the model demo brings one."""
    tokens: int = 64
    """T, the length of a block; its last token is the last query."""
    blocks: int = 600
    """Blocks in all, evenly spread over the text."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda, cuda:1, mps."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What its weights are held in; measurements are taken in float32 at least."""
    special: bool = False
    """Put the model's opening token ([CLS], or its beginning of a text) before every block."""
    top: int = 20
    """Rows of the table; 0 shows all."""
    out: Path | None = None
    """Write a page (.html) or a figure (.svg, .png, .pdf, .json) here."""
    json: bool = False
    """Print everything as JSON."""

    def load(self) -> tuple[Any, Any]:
        """The model, and the text in blocks of its tokens."""
        from locater.models.loading import load_model, read_text, text_blocks

        text = read_text(text_of(self.model, self.text))
        model, tokenizer = load_model(self.model, device=self.device, dtype=self.dtype, say=say)
        sizes = {"tokens": self.tokens, "blocks": self.blocks}
        return model, text_blocks(tokenizer, text, special=self.special, **sizes)


@dataclass(frozen=True, kw_only=True)
class ProbeCommand(OnText):
    """Measure what every head of a model does on a text, with the model's own attention."""

    queries: Literal["last", "all"] | int = "all"
    """The queries of a block to look at, or a number of random ones; ρ is that of the last."""
    layers: str | None = None
    """Only attentions whose name this regular expression finds."""
    batch: int = 16
    """Blocks that run together."""
    seed: int = 0
    """Of the random queries."""


def do_probe(arguments: Sequence[str]) -> None:
    """Measure, then print tables, JSON or where the page is."""
    command = parse(ProbeCommand, "probe", arguments, first="model")
    check_figure(command.out)
    import torch

    from locater.models.names import plain_name
    from locater.probe.probe import Probe

    model, blocks = command.load()
    generator = torch.Generator().manual_seed(command.seed)
    probe = Probe(model, queries=command.queries, keep=0, strict=False, generator=generator)
    known = [place.name for place in probe.places.values()]
    _check_layers(command.layers, [*known, *map(plain_name, dict(model.named_modules()))], known)
    with progress("blocks") as report:
        for done in probe.run(blocks, batch=command.batch):
            report(done, len(blocks))
    data = _selected(probe, command.layers) | {"blocks": len(blocks), "tokens": command.tokens}
    say(plain(probe.summary()))
    for name in data["unseen"]:
        say(plain(f"note: {name} did nothing that could be seen."))
    if command.out is not None:
        from locater.report.probe_view import save_probe

        say(f"wrote {save_probe(data, command.out, title=command.model)}")
    if command.json:
        print_json(data)
    else:
        _show(data, command.top)
    say("`locater explain` holds the same heads against the theory, where there is one for them.")


def _check_layers(layers: str | None, names: Iterable[str], attentions: Iterable[str]) -> None:
    """Refuse a pattern that finds none of these names."""
    if layers is not None and not any(re.search(layers, name) for name in names):
        raise LocaterError(
            f"--layers {layers!r} selects none of these attentions: "
            f"{', '.join(dict.fromkeys(attentions))}.",
            hint="it is a regular expression, searched for in these names.",
        )


def _selected(probe: Any, layers: str | None) -> dict[str, Any]:
    """What was measured of the attentions that were asked for, as plain data."""

    def chosen(records: Sequence[Any]) -> list[Any]:
        return [one for one in records if layers is None or re.search(layers, one.name)]

    heads = chosen(probe.records)
    if not heads and chosen(probe.alarms):
        for alarm in chosen(probe.alarms):
            say(plain(f"alarm: {alarm.message}"))
        raise LocaterError(
            "no head could be measured: nothing finite came by.", hint="see the alarms above."
        )
    names = [one.name for one in probe.records]
    _check_layers(layers, names, names)
    return {
        "heads": [one.as_dict() for one in heads],
        "layers": [asdict(one) for one in chosen(probe.rank)],
        "alarms": [asdict(one) for one in chosen(probe.alarms)],
        "unseen": probe.unseen,
    }


def _show(data: dict[str, Any], top: int) -> None:
    from locater.report.probe_view import HEADS, LAYERS, sharpest_first
    from locater.report.tables import terminal_table

    heads = sharpest_first(data["heads"])
    title = "heads, the lowest share of ln T first"
    show(terminal_table(heads[: top or None], HEADS, title=title))
    show(terminal_table(data["layers"], LAYERS, title="tokens that enter each layer"))
    left = f" ({top} shown)" if 0 < top < len(heads) else ""
    print(f"{len(heads)} heads{left} on {data['blocks']} blocks of {data['tokens']} tokens.")
    alarms = [plain(f"alarm: {alarm['message']}") for alarm in data["alarms"]]
    print("\n".join(alarms or ["no alarms."]))


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


def do_moments(arguments: Sequence[str]) -> None:
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
