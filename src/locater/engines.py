"""Running independent pieces of work: on this machine's cores, or as tasks of a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch

from locater.errors import LocaterError, needing, unknown

Engine = Literal["local", "ray"]
Result = TypeVar("Result")


def run_units(
    work: Callable[[int], Result],
    units: Sequence[int],
    *,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    gpus: float = 0,
) -> Generator[tuple[int, Result], None, None]:
    """Yield each unit with its result as it completes; every unit has one thread to itself.

    `ray` needs the extra `cluster`, and `locater` installed on every node; a task whose worker dies
    is run again.  There a unit may ask for GPUs, or for a share of one.

    >>> sorted(run_units(lambda unit: unit * unit, [1, 2, 3]))
    [(1, 1), (2, 4), (3, 9)]
    """
    if engine == "local":
        return _on_threads(work, units, workers or os.cpu_count() or 1)
    if engine == "ray":
        return _on_ray(work, units, workers, ray_address, gpus)
    raise unknown("engine", engine, ("local", "ray"))


def run_all(
    work: Callable[[int], Result],
    count: int,
    *,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    report: Callable[[int, int], None] | None = None,
    done: Mapping[int, Result] | None = None,
    keep: Callable[[int, Result], None] | None = None,
) -> list[Result]:
    """The results of units 0, 1, … in their order, however they complete.

    Those that are `done` are not run again; `keep` is given every other one, `report` their number.

    >>> run_all(lambda unit: unit * unit, 4, workers=2)
    [0, 1, 4, 9]
    """
    found = dict(done or {})
    missing = [unit for unit in range(count) if unit not in found]
    units = run_units(work, missing, engine=engine, workers=workers, ray_address=ray_address)
    with closing(units):
        for unit, made in units:
            if keep is not None:
                keep(unit, made)
            found[unit] = made
            if report is not None:
                report(len(found), count)
    return [found[unit] for unit in range(count)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Switch torch's own threads off: small matrices suffer from them, badly on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _on_threads(
    work: Callable[[int], Result], units: Sequence[int], workers: int
) -> Generator[tuple[int, Result], None, None]:
    if workers == 1:
        with one_thread():
            yield from ((unit, work(unit)) for unit in units)
        return
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    waiting: dict[Future[Result], int] = {}
    queue = iter(units)
    with one_thread():
        try:
            while True:
                for unit in queue:
                    waiting[pool.submit(work, unit)] = unit
                    if len(waiting) >= 2 * workers:
                        break
                if not waiting:
                    return
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _on_ray(
    work: Callable[[int], Result],
    units: Sequence[int],
    workers: int | None,
    address: str | None,
    gpus: float,
) -> Generator[tuple[int, Result], None, None]:
    with needing("ray", extra="cluster"):
        import ray
    is_ours = not ray.is_initialized()
    if is_ours:
        options: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False}
        if address:
            _check_answers(address)
            options = {"address": address}
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # a node that dies while it starts is a bare Exception
            raise _no_cluster(address, str(error)) from error
    try:
        task: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=5)(_task)
        shared = ray.put(work)
        waiting = {task.remote(shared, unit): unit for unit in units}
        while waiting:
            for done in ray.wait(list(waiting))[0]:
                yield waiting.pop(done), ray.get(done)
    except ray.exceptions.RayTaskError as error:  # the work itself failed
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise LocaterError(
            f"the Ray cluster lost a unit: {error}",
            hint="run again: what is stored is not computed twice.",
        ) from error
    finally:
        if is_ours:
            ray.shutdown()


def _task(work: Callable[[int], Result], unit: int) -> Result:
    torch.set_num_threads(1)
    return work(unit)


def _check_answers(address: str) -> None:
    """Ray itself waits for minutes before it says that nobody is there."""
    if address in ("auto", "local"):
        return
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=5):
            pass
    except (OSError, ValueError) as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str | None, reason: str) -> LocaterError:
    return LocaterError(
        f"no Ray cluster answers at {address or 'this machine'}: {reason}.",
        hint="check the address (HOST:6379), or leave it out to start a cluster here.",
    )
