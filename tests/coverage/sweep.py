"""Put every model type to the test, one after the other, in a process that may die.

    python -m tests.coverage.sweep                     all that are not in the results yet
    python -m tests.coverage.sweep --again wrong       again what was wrong
    python -m tests.coverage.sweep llama 'qwen.*'      some, by name
    python -m tests.coverage.sweep --summary           what the results say
    python -m tests.coverage.sweep --causes            what keeps families from being verified

    python -m tests.coverage.sweep --publish           what the repository keeps of it

Results are one JSON object per line and family; the last line of a family counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

SECONDS = 90
"""For one family."""
MEMORY = 8 << 30
RESULTS = Path("out/coverage.jsonl")


class Worker:
    """A process that checks families, one at a time; a new one takes its place when it dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def check(self, family: str) -> dict[str, Any]:
        """Check one family; what kills the process is its result."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process is not None and self.process.stdin and self.process.stdout
        start = time.monotonic()
        self.process.stdin.write(f"{family}\n".encode())
        self.process.stdin.flush()
        line = self._line()
        if line:
            return json.loads(line)
        reason = f"it takes more than {SECONDS} s" if time.monotonic() - start > SECONDS else (
            "the process died: out of memory, or a crash"
        )  # fmt: skip
        self.stop()
        return {"family": family, "status": "cannot build", "missing": [reason], "sites": []}

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.coverage.sweep", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def _line(self) -> bytes:
        assert self.process is not None and self.process.stdout
        descriptor, data = self.process.stdout.fileno(), b""
        limit = time.monotonic() + SECONDS + 60  # a fresh process imports torch first
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(limit - time.monotonic(), 0))
            if not ready:
                return b""
            more = os.read(descriptor, 1 << 20)
            if not more:
                return b""
            data += more
        return data


def work() -> None:
    """Read families, write records."""
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever models print is no record
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from tests.coverage.check import check

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    for line in sys.stdin:
        family = line.strip()
        signal.alarm(SECONDS)
        try:
            record = check(family).as_dict()
        except TimeoutError:
            record = _failed(family, f"it takes more than {SECONDS} s")
        except MemoryError:
            record = _failed(family, f"it takes more than {MEMORY >> 30} GB")
        except Exception as error:  # noqa: BLE001
            import traceback

            where = traceback.extract_tb(error.__traceback__)[-1]
            record = _failed(
                family,
                f"the test fails: {type(error).__name__}: {error} ({Path(where.filename).name})",
            )
        signal.alarm(0)
        answers.write(json.dumps(record) + "\n")
        answers.flush()


def _failed(family: str, reason: str) -> dict[str, Any]:
    return {"family": family, "status": "cannot build", "missing": [reason[:300]], "sites": []}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of every family."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    return {record["family"]: record for record in records}


def write(path: Path, records: dict[str, dict[str, Any]]) -> None:
    """One line per family, in the order of their names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(records[name]) + "\n" for name in sorted(records))
    temporary = path.with_suffix(".partial")
    temporary.write_text(text)
    temporary.replace(path)


def chosen(arguments: argparse.Namespace, known: dict[str, dict[str, Any]]) -> list[str]:
    """The families to put to the test now."""
    from tests.coverage.tiny import families

    every = families()
    if arguments.names:
        return [one for one in every if any(re.fullmatch(name, one) for name in arguments.names)]
    if arguments.again:
        return [one for one in every if known.get(one, {}).get("status") in arguments.again]
    return [one for one in every if one not in known]


def summary(records: dict[str, dict[str, Any]]) -> str:
    """How many families have which status."""
    counts = Counter(record["status"] for record in records.values())
    seconds = sum(record.get("seconds", 0) for record in records.values())
    lines = [f"{many:5d}  {status}" for status, many in counts.most_common()]
    return "\n".join([*lines, f"{len(records):5d}  in {seconds / 60:.1f} minutes"])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="regular expressions of families")
    parser.add_argument("--again", nargs="*", help="statuses to check again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--summary", action="store_true", help="count, and check nothing")
    parser.add_argument("--publish", action="store_true", help="write results, table and page")
    parser.add_argument("--causes", action="store_true", help="group by cause, and check nothing")
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    records = read(arguments.out)
    if arguments.causes:
        from tests.coverage.causes import table

        left_out = ("cannot build", "no softmax attention")
        checked = [one for one in records.values() if one["status"] not in left_out]
        sys.stdout.write(table(checked) + "\n")
        return
    if arguments.publish:
        from tests.coverage.publish import publish

        publish(records)
        return
    if not arguments.summary:
        worker = Worker()
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with arguments.out.open("a") as file:
                for family in chosen(arguments, records):
                    record = worker.check(family)
                    records[family] = record
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    told = (
                        "; ".join(record["missing"])[:160] if record["status"] != "verified" else ""
                    )
                    sys.stderr.write(f"{record['status']:12s} {family}  {told}\n")
        finally:
            worker.stop()
        write(arguments.out, records)
    sys.stdout.write(summary(records) + "\n")


if __name__ == "__main__":
    main()
