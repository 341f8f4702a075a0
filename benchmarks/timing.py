"""Measuring side by side: CPU seconds of one core, ratios with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """CPU seconds of one piece of work, measured several times."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def times(self, factor: float) -> Timing:
        return Timing([factor * second for second in self.seconds])

    def __str__(self) -> str:
        return f"{self.median:.4g} s [{min(self.seconds):.4g}, {max(self.seconds):.4g}]"


def cpu_time(work: Callable[[], object], *, repeats: int = 5, warmup: bool = True) -> Timing:
    """Run the work on one thread and take the process' CPU time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if warmup:
            work()
        seconds = []
        for _ in range(repeats):
            start = time.process_time()
            work()
            seconds.append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return Timing(seconds)


def ratio(slow: Timing, fast: Timing) -> str:
    """How many times faster, with the range over all pairs of measurements."""
    low, high = min(slow.seconds) / max(fast.seconds), max(slow.seconds) / min(fast.seconds)
    return f"{slow.median / fast.median:.3g}x [{low:.3g}, {high:.3g}]"
