"""Threads, copies and pickles: a probe counts right and what it watches stays what it is."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.probe.test_probe_model import Stack, randn
from torch import Tensor, nn
from torch.nn.modules import module as modules

from locater import Probe
from locater.probe import kernels

THREADS, PASSES = 3, 10


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """The work of all threads, begun at once."""
    start = threading.Barrier(THREADS)

    def begin(place: int) -> Any:
        start.wait()
        return work(place)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


@pytest.mark.parametrize("is_fast", [False, True])
def test_several_threads_on_one_model(is_fast: bool) -> None:
    model: nn.Module = Stack()
    if is_fast:  # a model whose modules PyTorch fuses: the mode is switched off and on
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    inputs = randn(THREADS, PASSES, 4, 7, 8)
    with torch.no_grad():
        plain = [[model(one) for one in part] for part in inputs]
    with Probe(model, queries="all") as truth, torch.no_grad():
        for one in inputs.flatten(0, 1):
            model(one)

    def work(place: int) -> list[Tensor]:
        with torch.no_grad():
            return [model(one) for one in inputs[place]]

    with Probe(model, queries="all") as probe:
        found = in_threads(work)
    for ours, theirs in zip(found, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (probe.forwards, probe.measured) == (THREADS * PASSES, THREADS * PASSES)
    assert len(probe.records) == 4
    for record, other in zip(
        sorted(probe.records, key=lambda one: (one.name, one.head)), truth.records, strict=True
    ):
        assert (record.name, record.rows) == (other.name, other.rows)
        assert record.entropy == pytest.approx(other.entropy, rel=1e-12)  # sums in another order
    assert not modules._global_forward_hooks and not modules._global_forward_pre_hooks


def test_several_models_probed_and_one_that_is_not() -> None:
    stacks = [Stack(2), Stack(3), Stack(1)]
    probes = [Probe(one, every=2) for one in stacks[:2]]
    inputs = randn(4, 7, 8)
    plain = [one(inputs) for one in stacks]

    def work(place: int) -> list[Tensor]:
        return [stacks[place](inputs) for _ in range(PASSES)]

    for probe in probes:
        probe.attach()
    found = in_threads(work)
    for probe in probes:
        probe.detach()
    for ours, theirs in zip(found, plain, strict=True):
        assert all(torch.equal(one, theirs) for one in ours)
    for probe, depth in zip(probes, (2, 3), strict=True):
        assert (probe.forwards, probe.measured) == (PASSES, PASSES // 2)
        assert [one.rows for one in probe.records] == [4 * PASSES // 2] * 2 * depth


def test_what_threads_keep_together_stays_within_keep() -> None:
    model, inputs = Stack(1), randn(4, 7, 8)
    with Probe(model, keep=6 * inputs[0].nbytes) as probe:
        in_threads(lambda _: model(inputs))
    assert len(probe.inputs(0)) == 6


def test_an_error_in_one_thread_is_nothing_to_the_others() -> None:
    model, inputs = Stack(), randn(4, 7, 8)

    def work(place: int) -> None:
        for _ in range(PASSES):
            if place == 1:
                with pytest.raises(RuntimeError):
                    model(inputs[..., :3])
            else:
                model(inputs)

    with Probe(model) as probe:
        in_threads(work)
    assert (probe.forwards, probe.measured) == (THREADS * PASSES, 2 * PASSES)
    assert {one.rows for one in probe.records} == {2 * PASSES * 4}


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]  # noqa: S301


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_copy_of_a_probed_model_is_the_model(copied: Any, is_inner: bool) -> None:
    model = Stack()
    whole = nn.Sequential(model) if is_inner else model  # a copy of what holds the probed model
    kept = model.register_forward_hook(_double)
    inputs = randn(2, 5, 8)
    plain = whole(inputs)
    with Probe(model) as probe, Probe(model) as other:
        again = copied(whole)
        inner = again[0] if is_inner else again
        assert list(inner._forward_hooks.values()) == [_double]
        assert not inner._forward_pre_hooks and "__reduce_ex__" not in vars(inner)
        assert not inner._forward_hooks_with_kwargs and not inner._forward_hooks_always_called
        assert torch.equal(again(inputs), plain)
        assert probe.forwards == other.forwards == 0
        assert torch.equal(whole(inputs), plain)
        with Probe(inner) as third:
            again(inputs)
        assert len(third.records) == 4
    assert (probe.forwards, other.forwards) == (1, 1)
    assert "__reduce_ex__" not in vars(model)
    kept.remove()
    assert not model._forward_hooks


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_a_model_may_be_copied_while_it_runs() -> None:
    class Copies(Stack):
        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            self.twin = [copy.deepcopy(self.layers)]
            return super().forward(inputs, mask)

    model = Copies()
    with Probe(model) as probe:
        model(randn(2, 5, 8))
        model(randn(2, 5, 8))
    assert not model.twin[0]._forward_hooks
    assert {one.rows for one in probe.records} == {4}


@pytest.mark.parametrize("kind", ["own hooks", "global hooks"])
def test_a_watcher_that_nobody_removed_ends_with_its_model(kind: str) -> None:
    """Dropping both is enough: no wrapper, no global hook and no model stays behind."""
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    whole = model if kind == "global hooks" else nn.Sequential(model)
    probe = Probe(whole)
    probe.attach()
    whole(torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)))
    left = weakref.ref(whole)
    assert kernels._users
    del model, whole, probe
    gc.collect()
    assert left() is None and not kernels._users and not kernels._places
    assert not modules._global_forward_hooks
