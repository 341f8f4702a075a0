"""`locater audit`: every head's query-key spectrum, from a file, a folder, a URL or a hub id."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from locater.cli.terminal import check_figure, console, parse, plain, print_json, progress, say
from locater.errors import ConfigError, LocaterError

if TYPE_CHECKING:
    from locater.audit.compare import Timeline
    from locater.audit.table import Audit, HeadRecord
    from locater.models.layout import Skipped


@dataclass(frozen=True, kw_only=True)
class TokenFlags:
    """What to assume of the tokens, and how to read files that do not say enough."""

    tokens: int = 512
    """T, the length of the sequence; its last token asks."""
    process: Literal["unit-walk", "random-walk", "autoregressive", "independent"] = "unit-walk"
    """The tokens that are assumed; all but the paper's random walk have unit variance."""
    phi: float = 0.9
    """Correlation of neighbors of the autoregressive process."""
    offset: int = 0
    """Distance between query and key at which rotary heads are taken."""
    gains: bool = True
    """Count the gains of the norm before an attention as part of W, where it is known."""
    base: str | None = None
    """The checkpoint that a LoRA adapter stands on."""
    heads: int | None = None
    """Number of heads, for a file without a config."""
    kv_heads: int | None = None
    """Number of key heads, for a file without a config."""

    def settings(self) -> dict[str, Any]:
        """The keywords of `audit_checkpoint`."""
        config = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        given = {name: value for name, value in config.items() if value is not None}
        names = ("tokens", "process", "phi", "offset", "gains", "base")
        return {name: getattr(self, name) for name in names} | {"config": given or None}


@dataclass(frozen=True, kw_only=True)
class AuditCommand(TokenFlags):
    """Audit every head of a checkpoint; several checkpoints of one run make a timeline."""

    paths: Positional[tuple[str, ...]]
    """Folders, files, URLs or hub ids."""
    text: Path | None = None
    """Run the model on this text (extra `hf`) and take its tokens' own means, kernel and
    covariance in place of assumed ones; try --tokens 64."""
    blocks: int = 256
    """Blocks of the text to run on, evenly spread."""
    exact: bool = False
    """Take ρ from the exact law of each score: up to a second per head."""
    eigenvalues: bool = True
    """Take eigenvalues and singular values; without them only sums are reported."""
    top: int = 20
    """How many heads to list, worst first; 0 lists all."""
    csv: Path | None = None
    """Write every head's row here."""
    parquet: Path | None = None
    """Write every head's row here (pip install pyarrow)."""
    out: Path | None = None
    """Write the interactive page here (.html), or a map of the heads (.svg, .png, .pdf)."""
    color: str = "verdict"
    """The column that colors the map of the heads."""
    json: bool = False
    """Print everything as JSON."""


def run(arguments: Sequence[str]) -> None:
    """Audit, write what was asked for, then print a table or JSON."""
    command = parse(AuditCommand, "audit", arguments)
    if not all(command.paths) or not command.paths:
        raise ConfigError("no checkpoint is named.", hint="locater audit FOLDER")
    if command.out is not None:
        check_figure(command.out)
        from locater.report.audit_view import check_column

        check_column(command.color)
    if len(command.paths) > 1 and (command.csv or command.parquet):
        raise ConfigError(
            "--csv and --parquet hold one checkpoint.", hint="use --json for a timeline."
        )
    from locater.audit.audit import audit_checkpoint
    from locater.audit.compare import Timeline

    settings = command.settings() | {
        "eigenvalues": command.eigenvalues,
        "method": "exact" if command.exact else "gaussian",
    }
    audits: list[Audit] = []
    for path in in_order(command.paths):
        with progress(plain(path)) as report:
            try:
                if command.text is None:
                    audits.append(audit_checkpoint(path, report=report, **settings))
                else:
                    audits.append(_with_text(command, path, settings, report))
            except LocaterError as error:
                if len(command.paths) == 1:
                    raise
                say(plain(f"left out {path}: {error.message}"))
    if not audits:
        raise LocaterError("none of the checkpoints could be read.", hint="see the lines above.")
    _write(command, audits)
    if len(audits) > 1:
        _show_timeline(Timeline(audits=tuple(audits)), command)
    elif command.json:
        print_json(audits[0].to_dict())
    else:
        _show(audits[0], command.top)


def in_order(paths: Sequence[str]) -> list[str]:
    """Checkpoints of one run by their numbers, as no shell lists them; others as they are given.

    >>> in_order(["run/checkpoint-1000", "run/checkpoint-200"])
    ['run/checkpoint-200', 'run/checkpoint-1000']
    """
    if len({re.sub(r"\d+", "#", path) for path in paths}) > 1:
        return list(paths)
    return sorted(paths, key=lambda path: [int(part) for part in re.findall(r"\d+", path)])


def _with_text(
    command: AuditCommand, path: str, settings: dict[str, Any], report: Callable[[int, int], None]
) -> Audit:
    """Audit a live model on the tokens that a text gives it."""
    if command.base or command.heads or command.kv_heads:
        raise ConfigError(
            "--text loads the model itself; --base, --heads and --kv-heads do not reach it.",
            hint="merge the adapter and store the model with its config, or leave --text out.",
        )
    from locater.audit.audit import audit_model
    from locater.models.loading import load_model, read_text, text_blocks
    from locater.reality.against_theory import measured_processes

    model, tokenizer = load_model(path)
    blocks = text_blocks(
        tokenizer, read_text(command.text or ""), tokens=command.tokens, blocks=command.blocks
    )
    processes = measured_processes(model, blocks, report=report)
    live = {name: value for name, value in settings.items() if name not in ("base", "config")}
    return audit_model(model, name=path, processes=processes, **live)


def _write(command: AuditCommand, audits: Sequence[Audit]) -> None:
    from locater.files import write_file

    if command.csv is not None:
        say(f"wrote {write_file(command.csv, audits[0].to_csv())}")
    if command.parquet is not None:
        say(f"wrote {write_file(command.parquet, audits[0].to_parquet())}")
    if command.out is not None:
        if command.out.suffix == ".html":
            from locater.report.audit_view import audit_page

            written = write_file(command.out, audit_page(audits))
        else:
            from locater.report.audit_view import audit_map_chart
            from locater.report.charts import save_chart

            written = save_chart(audit_map_chart(audits[-1], command.color), command.out)
        say(f"wrote {written}")


def head_name(part: str, kind: str, layer: int, head: int) -> str:
    """Layer and head, with the first letters of stack or tower: d3.1, e0.2, vis7.0; × is cross."""
    tower = {"model": "", "decoder": "d", "encoder": "e"}.get(part, plain(part)[:3])
    return f"{tower}{layer}{'×' if kind == 'cross' else ''}.{head}"


def _named(row: HeadRecord) -> str:
    return head_name(row.part, row.kind, row.layer, row.head)


def _number(value: float | None, digits: str = ".3g") -> str:
    return "-" if value is None else format(value, digits)


def _show(audit: Audit, top: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        *("head", "verdict", "looks", "on", "r", "η", "tr W, z", "spread", "‖W‖₂", "entropy"),
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
    rows = audit.worst_first()
    shown = rows[: top or None]
    for row in shown:
        table.add_row(
            _named(row),
            row.verdict.removesuffix(" risk"),
            row.regime,
            str(row.tokens_on),
            _number(row.r),
            _number(row.eta),
            _number(row.trace_z, ".1f"),
            _number(row.spread_ratio, ".2f"),
            _number(row.norm_ratio, ".2f"),
            _number(row.entropy, ".2f"),
        )
    out = console()
    out.print(table)
    if len(shown) < len(rows):
        out.print(f"… and {len(rows) - len(shown)} more heads: --top 0, --json or --csv has them.")
    reasons = Counter(row.verdict for row in rows)
    for verdict in reasons:
        worst = next(row for row in rows if row.verdict == verdict)
        if verdict != "healthy":
            out.print(Text(f"{verdict}: {_named(worst)}: {plain(worst.reason)}"))
    out.print(Text(plain(audit.summary)))
    say_limits(audit.caveats, audit.skipped)


def say_limits(caveats: Iterable[str], skipped: Iterable[Skipped]) -> None:
    """What the table rests on and what is not in it."""
    for caveat in caveats:
        say(f"caveat: {plain(caveat)}")
    for one in skipped:
        say(f"skipped: {plain(one.name)}: {plain(one.reason)}")


def _show_timeline(line: Timeline, command: AuditCommand) -> None:
    if command.json:
        print_json(line.to_dict())
        return
    from rich.table import Table

    table = Table("checkpoint", "heads", "not healthy", "median |r|", "median η", "entropy, least",
                  "median", "moved")  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    tracks = line.trajectories()
    for place, audit in enumerate(line.audits):
        steps = [one["r"][place - 1 : place + 1] for one in tracks if place]
        moves = [abs(b - a) for a, b in steps if a is not None and b is not None]
        table.add_row(
            plain(Path(audit.name).name or audit.name),
            str(len(audit.rows)),
            str(sum(row.verdict not in ("healthy", "not judged") for row in audit.rows)),
            _number(median(abs(row.r) for row in audit.rows)),
            _number(median(row.eta for row in audit.rows)),
            _number(min(row.entropy for row in audit.rows), ".2f"),
            _number(median(row.entropy for row in audit.rows), ".2f"),
            f"{max(moves):.3g}" if moves else "-",
        )
    out = console()
    out.print(table)
    out.print("moved: the largest change of r in one head since the checkpoint before.")
    _show_movers(tracks, command.top, out)
    say_limits(line.caveats, dict.fromkeys(one for audit in line.audits for one in audit.skipped))


def _show_movers(tracks: list[dict[str, Any]], top: int, out: Any) -> None:
    from rich.table import Table

    whole = [one for one in tracks if None not in one["r"]]
    whole.sort(key=lambda one: -(max(one["r"]) - min(one["r"])))
    table = Table("head", "r", "η", "entropy bound", "verdict")
    for one in whole[: top or None]:
        table.add_row(
            head_name(one["part"], one["kind"], one["layer"], one["head"]),
            *(
                " → ".join(_number(value) for value in (one[column][0], one[column][-1]))
                for column in ("r", "eta", "entropy_bound")
            ),
            " → ".join(dict.fromkeys((one["verdict"][0], one["verdict"][-1]))),
        )
    out.print(table)
