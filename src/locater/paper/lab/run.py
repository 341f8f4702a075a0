"""A training run on disk: settings, environment, metrics, checkpoints that survive anything."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from locater.errors import InputError, LocaterError
from locater.files import LOCK, sync_folder, write_file
from locater.notebook import Shown
from locater.paper.lab.loss import is_native
from locater.paper.lab.settings import TrainConfig

Record = dict[str, Any]
KEPT = 2
"""Checkpoints on disk: the last, and the one before it in case the last is damaged."""
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
           SafetensorError)  # fmt: skip
_DEPTHS = {
    **dict.fromkeys(("train_loss", "valid_loss", "whole_valid_loss", "best_valid_loss", "test_loss",
                     "accuracy", "best_step"), 0),
    **dict.fromkeys(("trace", "trace_of_square", "frobenius_squared", "variance", "r", "entropy",
                     "max_logit", "rank"), 1),
    **dict.fromkeys(("rho", "predicted_rho"), 2),
}  # fmt: skip
"""Of what a record holds: a number, one for each layer, or layers of one for each token."""


class DivergedError(LocaterError):
    """The loss is NaN or infinite; `layer` is the first module whose output is."""

    def __init__(self, step: int, layer: str) -> None:
        super().__init__(
            f"the loss is NaN or infinite at step {step}; the first such output is {layer}'s.",
            hint="the last good checkpoint is kept; lower the learning rate or try a --stabilizer.",
        )
        self.step, self.layer = step, layer

    def __reduce__(self) -> tuple[Any, ...]:
        return DivergedError, (self.step, self.layer)  # it travels between processes


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Tensors of the model and of everything else that training needs, after so many steps."""

    step: int
    model: dict[str, Tensor]
    state: dict[str, Tensor]
    metrics_bytes: int
    """Length of the metrics when it was made: what stands after it is made again."""
    carried: Record
    """Plain numbers that go on: sums of the losses since the last measurement, seconds spent."""


@dataclass(frozen=True, eq=False, repr=False)
class Run(Shown):
    """One training run: its settings, where it was made, and what was measured.

    `Run.load` reads a folder with checkpoints or an exported `.jsonl`; figures need no more.
    """

    config: TrainConfig
    environment: Record
    records: list[Record] = field(default_factory=list)
    path: Path | None = None

    _picture = ("line", "step:Q", "train_loss:Q", "seed:N")

    def _line(self) -> str:
        return f"{self.path or self.config.corpus}, {len(self.records)} measurements"

    def _table(self) -> list[dict[str, Any]]:
        return self.records

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a run's folder, or the file that `export` wrote."""
        try:
            if path.is_dir():
                config = TrainConfig.from_dict(json.loads((path / "config.json").read_text()))
                environment = json.loads((path / "environment.json").read_text())
                metrics = path / "metrics.jsonl"
                text = metrics.read_text() if metrics.exists() else ""
                lines = text[: text.rfind("\n") + 1].splitlines()  # a torn last line is no record
            else:
                first, *lines = path.read_text().splitlines()
                head = json.loads(first)
                config = TrainConfig.from_dict(head["config"])
                environment = head["environment"]
            corpus = environment.get("corpus", {})
            return cls(config, {**environment, "corpus": {**corpus}}, _records(lines), path)
        except (LocaterError, *_DAMAGE) as error:
            raise InputError(
                f"{path} is not a run: {getattr(error, 'message', error)}.".replace("..", "."),
                hint="give a folder of `locater train --out`, or a .jsonl of published results.",
            ) from error

    @property
    def final(self) -> Record | None:
        """The last record of a run that came to its end, or None."""
        return self.records[-1] if self.records and "end" in self.records[-1] else None

    @property
    def has_diverged(self) -> bool:
        """Whether it ended with a loss that is NaN or infinite."""
        return self.final is not None and self.final["end"] == "diverged"

    def series(self, name: str) -> list[tuple[int, Any]]:
        """Steps and values of one quantity, wherever it was measured."""
        return [(record["step"], record[name]) for record in self.records if name in record]

    def export(self, folder: Path) -> Path:
        """Write what figures need as one file named by the settings' digest.

        No checkpoints, and eigenvalues only of the first and the last record.
        """
        head = {"config": asdict(self.config), "environment": self.environment}
        ends = (0, len(self.records) - 1)
        thin = [
            {k: v for k, v in record.items() if k != "eigenvalues" or place in ends}
            for place, record in enumerate(self.records)
        ]
        form: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
        lines = [json.dumps(part, **form) for part in (head, *thin)]
        return write_file(folder / f"{self.config.digest}.jsonl", "\n".join(lines) + "\n")


class RunFolder:
    """The folder of a run in the making; only the first of several processes writes.

    Metrics are appended and checkpoints put in place whole, so that a run that is killed at any
    moment goes on from its last checkpoint as if nothing had been.
    """

    def __init__(self, path: Path, *, is_writer: bool = True) -> None:
        self.path, self.is_writer = path, is_writer
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"

    def open(self, config: TrainConfig, environment: Record) -> None:
        """Make the folder, or check that it belongs to these settings and this corpus."""
        stored = self.path / "config.json"
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file.", hint="give a folder as --out.")
        if stored.exists():
            found = Run.load(self.path)
            if found.config != config:
                raise _other_settings(self.path, found.config, config)
            if found.environment.get("corpus") != environment.get("corpus"):
                raise InputError(
                    f"{self.path} was trained on another text.",
                    hint="give the same --data, or another --out.",
                )
            return
        if self.path.exists() and not all(_is_beginning(one) for one in self.path.iterdir()):
            raise InputError(
                f"{self.path} is not empty and holds no run.", hint="give an empty --out."
            )
        if self.is_writer:
            write_file(self.path / "environment.json", _pretty(environment))
            write_file(stored, _pretty(asdict(config)))

    def append(self, record: Record) -> None:
        """Add one record to the metrics."""
        if not self.is_writer:
            return
        try:
            with self.metrics.open("a") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritten(self.metrics, error) from error

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        carried: Record,
        described: Record | None = None,
    ) -> None:
        """Put a checkpoint in place whole, then let go of all but the last two."""
        if not self.is_writer:
            return
        parts = {"model.safetensors": save(dict(model)), "state.safetensors": save(dict(state))}
        manifest = {
            "step": step,
            "metrics_bytes": self.metrics.stat().st_size if self.metrics.exists() else 0,
            "carried": carried,
            "digests": {name: _digest(data) for name, data in parts.items()},
        }
        manifest["digest"] = _digest(_pretty(manifest).encode())
        parts |= {
            "manifest.json": _pretty(manifest).encode(),
            "config.json": _pretty(described or {}).encode(),
        }
        place, draft = self.checkpoints / f"step-{step:08d}", self.checkpoints / f".step-{step:08d}"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            for name, data in parts.items():
                write_file(draft / name, data)
            shutil.rmtree(place, ignore_errors=True)
            draft.rename(place)
            sync_folder(self.checkpoints)
        except (LocaterError, OSError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise LocaterError(
                error.message
                if isinstance(error, LocaterError)
                else f"cannot write {place}: {error}.",
                hint="make room, then run the same command again: the checkpoint before it is "
                "whole.",
            ) from error
        for old in self._steps()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def discard(self, step: int) -> None:
        """Forget a checkpoint from which the very next step fails; the one before it is good."""
        if self.is_writer:
            shutil.rmtree(self.checkpoints / f"step-{step:08d}", ignore_errors=True)

    def restore(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, and a sentence for every one that is damaged.

        The metrics are cut back to it.
        """
        said = []
        for place in reversed(self._steps()):
            try:
                checkpoint = _read(place)
            except _DAMAGE as error:
                said.append(f"checkpoint {place.name} is damaged ({error}); taking an earlier one.")
                continue
            size = self.metrics.stat().st_size if self.metrics.exists() else 0
            if size < checkpoint.metrics_bytes:
                said.append(f"metrics end before checkpoint {place.name}; taking an earlier one.")
                continue
            self._truncate(checkpoint.metrics_bytes)
            return checkpoint, said
        if self.is_writer and self.metrics.exists() and self._was_finished():
            kept = self.metrics.with_suffix(".old.jsonl")
            self.metrics.replace(kept)  # its end was reached once: what was measured is not lost
            said.append(f"the run was over, but its models are gone; its metrics are in {kept}.")
        self._truncate(0)
        if said:
            said.append("no checkpoint is whole; starting again from step 0.")
        return None, said

    def _was_finished(self) -> bool:
        """Whether the metrics reach the end of the run, whatever became of its models."""
        found = self.load()
        return found.final is not None and not found.has_diverged

    def load(self) -> Run:
        """The run as it is on disk now."""
        return Run.load(self.path)

    def finished(self) -> Run | None:
        """The run if it came to its end and its last model is there, whole; else None."""
        run = self.load()
        if run.final is None or run.has_diverged:
            return None
        try:
            _read(self.checkpoints / f"step-{run.final['step']:08d}")
        except _DAMAGE:
            return None
        return run

    def _steps(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"))

    def _truncate(self, size: int) -> None:
        if not self.is_writer or not self.metrics.exists():
            return
        try:
            os.truncate(self.metrics, size)
        except OSError as error:
            raise _unwritten(self.metrics, error) from error


def _records(lines: Sequence[str]) -> list[Record]:
    """What was measured, line by line; ValueError where a line says what no measurement does."""
    records = []
    for place, line in enumerate(lines, 1):
        record = json.loads(line)
        step, end = record["step"], record.get("end", "finished")
        if type(step) is not int or not 0 <= step < 2**53 or end not in ("finished", "diverged"):
            raise ValueError(f"record {place} has step {step!r:.40} and end {end!r:.40}")
        for name, depth in _DEPTHS.items():
            if name in record and not _is_measured(record[name], depth):
                raise ValueError(f"record {place} has no numbers as {name!r}")
        records.append(record)
    return records


def _is_measured(value: Any, depth: int) -> bool:
    """A number or None (for NaN), or lists of them, all of one length."""
    if depth:
        is_list = isinstance(value, list) and value != []
        return (
            is_list
            and all(_is_measured(part, depth - 1) for part in value)
            and (depth == 1 or len({len(part) for part in value}) == 1)
        )
    return value is None or (type(value) in (int, float) and abs(value) < 1e100)


def _unwritten(path: Path, error: OSError) -> LocaterError:
    return LocaterError(
        f"cannot write {path}: {error.strerror or error}.",
        hint="make room, then run the same command again: it goes on from the last checkpoint.",
    )


def _is_beginning(path: Path) -> bool:
    """What a run leaves that was killed before its settings were in place."""
    names = ("config.json", "environment.json")
    return path.name in (LOCK, *names) or path.name.startswith(tuple(f".{n}." for n in names))


def describe_environment(corpus: Mapping[str, Any]) -> Record:
    """Versions, commit and corpus: what a reader needs to make the run again; no paths."""
    names = ("locater", "torch", "accelerate", "tokenizers", "numpy")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # pragma: no cover - an extra that is not there
            continue
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": versions,
        "commit": source_commit(),
        "bfloat16": "native" if is_native(torch.bfloat16, "cpu") else "rounded float32",
        "corpus": dict(corpus),
    }


def source_commit() -> str | None:
    """The commit of the source tree, `+` where it has changes; None for an installed package."""
    here = Path(__file__).parent

    def ask(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = "+" if ask("status", "--porcelain", "--untracked-files=no", ".") else ""
        return ask("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return None


def rounded(value: Any, digits: int = 6) -> Any:
    """Numbers to so many significant digits, through lists and dictionaries; NaN becomes None."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [rounded(part, digits) for part in value]
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    return value


def _read(place: Path) -> Checkpoint:
    manifest = json.loads((place / "manifest.json").read_text())
    digest = manifest.pop("digest", None)  # older ones have none
    if digest not in (None, _digest(_pretty(manifest).encode())):
        raise ValueError("manifest.json is not what was written")
    parts = {}
    for name, digest in manifest["digests"].items():
        data = (place / name).read_bytes()
        if _digest(data) != digest:
            raise ValueError(f"{name} is not what was written")
        parts[name] = dict(sorted(load(data).items()))  # in one order on all processes
    return Checkpoint(
        step=manifest["step"],
        model=parts["model.safetensors"],
        state=parts["state.safetensors"],
        metrics_bytes=manifest["metrics_bytes"],
        carried=manifest["carried"],
    )


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _pretty(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _other_settings(path: Path, found: TrainConfig, config: TrainConfig) -> InputError:
    theirs, ours = asdict(found), asdict(config)
    name = next(name for name in ours if ours[name] != theirs[name])
    return InputError(
        f"{path} holds a run with {name} = {theirs[name]!r}, not {ours[name]!r}.",
        hint="give another --out, or the settings of its config.json to go on with it.",
    )
