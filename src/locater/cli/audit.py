"""Every head's query-key spectrum, from files: `locater audit`, `locater compare`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from tyro.conf import Positional, Suppress

from locater.audit.audit import AuditConfig, audit_checkpoint, audit_model
from locater.audit.compare import HeadChange, Timeline, compare_checkpoints
from locater.audit.table import Audit, stands_out
from locater.cli.terminal import check_figure, parse, plain, print_json, progress, say, show, values
from locater.core.process import ProcessName, TokenProcess
from locater.engines import Engine, run_all
from locater.errors import ConfigError, LocaterError
from locater.files import write_file
from locater.models.layout import Skipped
from locater.report.tables import Columns, terminal_table


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointFlags(AuditConfig):
    """What to assume of the tokens, and how to read files that do not say enough."""

    process: ProcessName = "unit-walk"
    """The tokens that are assumed; all but the paper's random walk have unit variance."""
    processes: Annotated[Mapping[str, TokenProcess], Suppress] = field(default_factory=dict)
    method: Annotated[Literal["gaussian", "exact"], Suppress] = "gaussian"
    exact: bool = False
    """Take ρ from the exact law of each score: up to a second per head."""
    base: str | None = None
    """The checkpoint that a LoRA adapter stands on."""
    heads: int | None = None
    """Number of heads, for a file without a config."""
    kv_heads: int | None = None
    """Number of key heads, for a file without a config."""

    def settings(self) -> dict[str, Any]:
        """The fields of `AuditConfig`."""
        method = "exact" if self.exact else self.method
        return values(AuditConfig, self) | {"method": method}

    def source(self) -> dict[str, Any]:
        """How to read the files, for `audit_checkpoint`."""
        config = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        given = {name: value for name, value in config.items() if value is not None}
        return {"base": self.base, "config": given or None}


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditCommand(CheckpointFlags):
    """Audit every head of a checkpoint; several checkpoints of one run make a timeline."""

    paths: Positional[tuple[str, ...]]
    """Folders, files, URLs or hub ids."""
    text: Path | None = None
    """Run the model on this text (extra `hf`): heads are judged by what they do on it, and every
    form is held against the model's own logits; try --tokens 64."""
    blocks: int = 256
    """Blocks of the text to run on, evenly spread."""
    top: int = 20
    """How many heads to list, worst or farthest from the others first; 0 lists all."""
    csv: Path | None = None
    """Write every head's row here."""
    parquet: Path | None = None
    """Write every head's row here (pip install pyarrow)."""
    out: Path | None = None
    """Write the interactive page here (.html), or a map of the heads (.svg, .png, .pdf)."""
    color: str | None = None
    """The column that colors the map of the heads; by default the one that tells most."""
    workers: int | None = None
    """Layers held at a time, or checkpoints of a timeline; one thread each."""
    engine: Engine = "local"
    """Where the checkpoints of a timeline are audited: here, or on Ray (extra `cluster`)."""
    ray_address: str | None = None
    """A running cluster, HOST:6379; without it --engine ray starts one here."""
    json: bool = False
    """Print everything as JSON."""


def do_audit(arguments: Sequence[str]) -> None:
    """Audit, write what was asked for, then print a table or JSON."""
    command = parse(AuditCommand, "audit", arguments)
    if not all(command.paths) or not command.paths:
        raise ConfigError("no checkpoint is named.", hint="locater audit FOLDER")
    if command.out is not None:
        check_figure(command.out)
        from locater.report.audit_view import check_column

        if command.color is not None:
            check_column(command.color)
    if len(command.paths) > 1 and (command.csv or command.parquet):
        raise ConfigError(
            "--csv and --parquet hold one checkpoint.", hint="use --json for a timeline."
        )
    audits = _audits(command)
    if not audits:
        raise LocaterError("none of the checkpoints could be read.", hint="see the lines above.")
    _write(command, audits)
    if len(audits) > 1:
        _show_timeline(Timeline(audits=tuple(audits)), command)
    elif command.json:
        print_json(audits[0].to_dict())
    else:
        _show(audits[0], command.top)
    if len(audits) < len(command.paths):
        raise LocaterError(
            f"{len(command.paths) - len(audits)} of {len(command.paths)} checkpoints could not be "
            "read and are left out.",
            hint="see the lines above.",
        )


def _audits(command: AuditCommand) -> list[Audit]:
    """One checkpoint, or several of which some are audited at a time and bad ones left out."""
    if len(command.paths) == 1:
        with progress(plain(command.paths[0])) as report:
            return [_audited(command, command.paths[0], report)]
    paths = in_order(command.paths)

    def work(place: int) -> Audit | LocaterError:
        try:
            return _audited(command, paths[place])
        except LocaterError as error:
            return error

    with progress("checkpoints") as report:
        found = run_all(
            work,
            len(paths),
            engine=command.engine,
            workers=1 if command.text else command.workers,
            ray_address=command.ray_address,
            report=report,
        )
    for path, one in zip(paths, found, strict=True):
        if isinstance(one, LocaterError):
            say(plain(f"left out {path}: {one.message}"))
    return [one for one in found if isinstance(one, Audit)]


def in_order(paths: Sequence[str]) -> list[str]:
    """Checkpoints of one run by their numbers, as no shell lists them; others as they are given.

    >>> in_order(["run/checkpoint-1000", "run/checkpoint-200"])
    ['run/checkpoint-200', 'run/checkpoint-1000']
    """
    if len({re.sub(r"\d+", "#", path) for path in paths}) > 1:
        return list(paths)
    return sorted(paths, key=lambda path: [int(part) for part in re.findall(r"\d+", path)])


def _audited(
    command: AuditCommand, path: str, report: Callable[[int, int], None] | None = None
) -> Audit:
    """Audit a file, or a live model on the tokens that a text gives it."""
    if command.text is None:
        workers = command.workers if len(command.paths) == 1 else 1
        return audit_checkpoint(
            path, workers=workers, report=report, say=say, **command.source(), **command.settings()
        )
    if command.base or command.heads or command.kv_heads:
        raise ConfigError(
            "--text loads the model itself; --base, --heads and --kv-heads do not reach it.",
            hint="merge the adapter and store the model with its config, or leave --text out.",
        )
    from locater.models.loading import load_model, read_text, text_blocks

    model, tokenizer = load_model(path, say=say)
    blocks = text_blocks(
        tokenizer, read_text(command.text), tokens=command.tokens, blocks=command.blocks
    )
    return audit_model(model, name=path, blocks=blocks, report=report, **command.settings())


def _write(command: AuditCommand, audits: Sequence[Audit]) -> None:
    if command.csv is not None:
        say(f"wrote {write_file(command.csv, audits[0].to_csv())}")
    if command.parquet is not None:
        say(f"wrote {write_file(command.parquet, audits[0].to_parquet())}")
    if command.out is not None:
        from locater.report.audit_view import audit_map_chart, audit_page, telling_column
        from locater.report.charts import save_chart

        if command.out.suffix == ".html":
            written = write_file(command.out, audit_page(audits))
        else:
            color = command.color or telling_column(audits[-1:])
            written = save_chart(audit_map_chart(audits[-1], color), command.out)
        say(f"wrote {written}")


def head_name(part: str, kind: str, layer: int, head: int) -> str:
    """Layer and head, with the stack and the kind where a model has several of them."""
    tower = "" if part in ("", "model") else f"{plain(part)} "
    return f"{tower}layer {layer} {'cross-attention ' if kind == 'cross' else ''}head {head}"


def named(row: Any) -> str:
    """The name of a row's head, stack and all."""
    return head_name(row.part, row.kind, row.layer, row.head)


def _deviation(row: Any) -> str | None:
    """Where a head is farthest from the others."""
    column = row.deviates_in.replace("_", " ")
    return None if row.deviation is None else f"{column} {row.deviation:+.1f}"


def _columns(audit: Audit) -> Columns:
    """What the table shows: verdicts where there are any, else what stands out."""
    judged: Columns = {"verdict": "verdict", "measured": "measured_entropy:.2f"}
    forms: Columns = {} if len({row.status for row in audit.rows}) == 1 else {"form": "status"}
    has_parts = len({row.part for row in audit.rows}) > 1
    return {
        "head": lambda row: head_name(row.part if has_parts else "", row.kind, row.layer, row.head),
        **forms,
        **(judged if audit.is_measured else {"stands out": _deviation}),
        "entropy": "entropy:.2f",
        "looks": "regime",
        "tokens\non": "tokens_on",
        "r": "r:.3g",
        "η": "eta:.3g",
        "trace vs\nrandom (z)": "trace_z:.1f",
        "spread vs\nrandom": "spread_ratio:.2f",
    }


_LEGEND = (
    "tokens on: how many keys' gradients pass the softmax; vs random: tr W in standard deviations, "
    "spread of the eigenvalues in multiples of random weights'; r = tr W/λ, η = ‖W‖/λ."
)


def _show(audit: Audit, top: int) -> None:
    for sentence in audit.head:
        show(plain(sentence))
    rows = audit.worst_first()
    shown = rows[: top or None]
    left = ("head", "form", "verdict", "looks", "stands out")
    show(terminal_table(shown, _columns(audit), left=left, is_compact=True))
    show(_LEGEND)
    if len(shown) < len(rows):
        show(f"… and {len(rows) - len(shown)} more heads: --top 0, --json or --csv has them.")
    if audit.is_measured:
        for verdict in dict.fromkeys(row.verdict for row in rows):
            worst = next(row for row in rows if row.verdict == verdict)
            if verdict != "healthy":
                show(f"{verdict}: {named(worst)}: {plain(worst.reason)}")
    else:
        show("stands out: the column in which a head is farthest from the median head, in robust "
             "deviations.")  # fmt: skip
    show(plain(audit.summary))
    say_limits(audit.caveats, audit.skipped)


def say_limits(caveats: Iterable[str], skipped: Iterable[Skipped]) -> None:
    """What the table rests on and what is not in it."""
    for caveat in caveats:
        say(f"caveat: {plain(caveat)}")
    for part in skipped:
        say(f"skipped: {plain(part.name)}: {plain(part.reason)}")


def _show_timeline(line: Timeline, command: AuditCommand) -> None:
    if command.json:
        print_json(line.to_dict())
        return
    tracks = line.trajectories()
    measured = all(audit.is_measured for audit in line.audits)
    for sentence in dict.fromkeys(sentence for audit in line.audits for sentence in audit.head):
        show(plain(sentence))

    def moved(place: int) -> float | None:
        steps = [track["r"][place - 1 : place + 1] for track in tracks if place]
        return max((abs(b - a) for a, b in steps if a is not None and b is not None), default=None)

    columns: Columns = {
        "checkpoint": lambda row: plain(Path(row.name).name or row.name),
        "heads": lambda row: len(row.rows),
        "not healthy" if measured else "stand out": lambda row: sum(
            head.verdict in ("collapsed", "uniform") if measured else stands_out(head)
            for head in row.rows
        ),
        "median |r|": lambda row: f"{median(abs(head.r) for head in row.rows):.3g}",
        "median η": lambda row: f"{median(head.eta for head in row.rows):.3g}",
        "entropy, least": lambda row: f"{min(head.entropy for head in row.rows):.2f}",
        "median": lambda row: f"{median(head.entropy for head in row.rows):.2f}",
        "moved": lambda row: _number(moved(line.audits.index(row))),
    }
    show(terminal_table(line.audits, columns, left=("checkpoint",)))
    show("moved: the largest change of r in one head since the checkpoint before.")
    whole = [track for track in tracks if None not in track["r"]]
    whole.sort(key=lambda track: min(track["r"]) - max(track["r"]))
    show(terminal_table(whole[: command.top or None], _MOVERS, left=tuple(_MOVERS)))
    say_limits(line.caveats, dict.fromkeys(one for audit in line.audits for one in audit.skipped))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ends(column: str) -> Callable[[dict[str, Any]], str]:
    return lambda track: " → ".join(_number(track[column][place]) for place in (0, -1))


_MOVERS: Columns = {
    "head": lambda track: head_name(track["part"], track["kind"], track["layer"], track["head"]),
    "r": _ends("r"),
    "η": _ends("eta"),
    "entropy bound": _ends("entropy_bound"),
    "looks": lambda track: " → ".join(dict.fromkeys((track["regime"][0], track["regime"][-1]))),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class CompareCommand(CheckpointFlags):
    """What changed from one checkpoint to another, head by head, most changed first."""

    before: Positional[str]
    """A folder, file, URL or hub id."""
    after: Positional[str]
    """The same model later: fine-tuned, further trained, with an adapter."""
    top: int = 20
    """How many heads to list; 0 lists all."""
    json: bool = False
    """Print everything as JSON."""


def _change(name: str) -> Callable[[HeadChange], str]:
    return lambda row: "-" if row.changes[name] is None else f"{row.changes[name]:+.3g}"


_HEADS: Columns = {
    "head": named,
    "‖ΔW‖/‖W‖": "distance:.3g",
    "Δr": _change("r"),
    "Δmean": _change("mean"),
    "Δvar": _change("variance"),
    "Δentropy": _change("entropy"),
    "looks": lambda row: " → ".join(dict.fromkeys((row.regime_before, row.regime_after))),
}


def do_compare(arguments: Sequence[str]) -> None:
    """Compare, then print a table or JSON."""
    command = parse(CompareCommand, "compare", arguments)
    with progress("compare") as report:
        comparison = compare_checkpoints(
            command.before,
            command.after,
            report=report,
            say=say,
            **command.source(),
            **command.settings(),
        )
    if command.json:
        print_json(comparison.to_dict())
        return
    for sentence in dict.fromkeys((*comparison.before.head, *comparison.after.head)):
        show(plain(sentence))
    shown = comparison.rows[: command.top or None]
    table = terminal_table(shown, _HEADS, left=("head", "looks"))
    table.pad_edge = False
    show(table)
    if len(shown) < len(comparison.rows):
        more = len(comparison.rows) - len(shown)
        show(f"… and {more} more heads: --top 0 or --json has them.")
    show(plain(comparison.summary))
    say_limits(comparison.to_dict()["caveats"], comparison.skipped)
