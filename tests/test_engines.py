"""Units of work on threads and on a Ray cluster of their own."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import jaxtyping
import pytest
import torch

from locater.engines import Engine, one_thread, run_units
from locater.errors import ConfigError, LocaterError


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_unit_is_run_once_whatever_the_order(workers: int) -> None:
    seen: list[int] = []
    units = [7, 3, 5, 1, 4, 0]
    results = run_units(lambda unit: seen.append(unit) or -unit, units, workers=workers)
    assert dict(results) == {unit: -unit for unit in units}
    assert sorted(seen) == sorted(units)


def test_units_run_side_by_side_on_one_thread_each() -> None:
    meeting = threading.Barrier(2, timeout=20)  # breaks, unless both units are under way at once

    def meet(unit: int) -> int:
        meeting.wait()
        return torch.get_num_threads()

    assert dict(run_units(meet, [0, 1], workers=2)) == {0: 1, 1: 1}


@pytest.mark.parametrize("workers", [1, 2])
def test_no_work_is_done_before_it_is_asked_for_nor_after_it_is_not(workers: int) -> None:
    started: list[int] = []
    runs = run_units(lambda unit: started.append(unit), range(100), workers=workers)
    assert started == []
    next(runs)
    runs.close()
    assert 1 <= len(started) <= 2 * workers  # as many as are handed out at a time


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("outcome", ["finished", "failed", "stopped"])
def test_torch_gets_its_threads_back(outcome: str, workers: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def work(unit: int) -> int:
        assert torch.get_num_threads() == 1
        return 1 // unit

    try:
        runs = run_units(work, [1, 0] if outcome == "failed" else [1, 1], workers=workers)
        if outcome == "stopped":
            next(runs)
            runs.close()
        elif outcome == "failed":
            with pytest.raises(ZeroDivisionError):
                list(runs)
        else:
            list(runs)
        assert torch.get_num_threads() == 3
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_unknown_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as on a user's machine
    engine: Engine = "steam"  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"unknown engine 'steam'.\nhint: choose one of: local, ray"
    ):
        run_units(lambda unit: unit, [1], engine=engine)


def closed_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


@pytest.mark.parametrize(
    "address",
    [
        lambda: f"127.0.0.1:{closed_port()}",
        lambda: f"ray://127.0.0.1:{closed_port()}",
        lambda: "nobody.invalid:6379",
        lambda: "127.0.0.1:70000",
        lambda: ":6379",
    ],
)
def test_a_cluster_that_does_not_answer_is_reported_within_seconds(
    address: Callable[[], str],
) -> None:
    place, start = address(), time.monotonic()
    with pytest.raises(LocaterError, match=r"no Ray cluster answers at .*\nhint: check the addr"):
        list(run_units(lambda unit: unit, [1], engine="ray", ray_address=place))
    assert time.monotonic() - start < 15


def test_a_node_that_dies_while_it_starts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says so by a bare Exception; found by killing raylets."""
    import ray

    def dies(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", dies)
    with pytest.raises(LocaterError, match=r"node timed out during startup[\s\S]*\nhint: "):
        list(run_units(lambda unit: unit, [1], engine="ray"))


@pytest.mark.distributed
def test_ray_starts_a_cluster_of_its_own_and_stops_it_also_after_an_error() -> None:
    import ray

    def work(unit: int) -> tuple[int, int]:
        if unit == 13:
            raise ConfigError("thirteen.", hint="avoid it.")
        return os.getpid(), torch.get_num_threads()

    results = {}
    with pytest.raises(ConfigError, match=r"^thirteen.\nhint: avoid it.$"):
        for unit, result in run_units(work, [1, 2, 3, 13], engine="ray", workers=1):
            results[unit] = result
    assert not ray.is_initialized()
    assert sorted(results) == [1, 2, 3]  # with one worker, in their order
    pids, threads = zip(*results.values(), strict=True)
    assert os.getpid() not in pids
    assert set(threads) == {1}
