"""A probe on every step of a long training: no memory kept, no step slower than the first."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from locater import Probe

pytestmark = pytest.mark.drill
STEPS, PART = 20_000, 1_000


def resident() -> int:
    """Kilobytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def test_twenty_thousand_probed_steps(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sizes, seconds = [], []
    with Probe(model, every=1, keep=0, generator=generator) as probe:
        began = time.process_time()
        for step in range(STEPS):
            tokens = torch.randn(2, 6, 8, generator=generator)
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
            if step % PART == PART - 1:
                now = time.process_time()
                sizes.append(resident())
                seconds.append(now - began)
                began = now
    assert probe.records
    assert all(len(module._forward_hooks) == 0 for module in model.modules())
    # after the first parts, in which allocators settle
    grown, quarter = max(sizes[-5:]) - max(sizes[2:7]), len(seconds) // 4
    first, last = sorted(seconds[:quarter]), sorted(seconds[-quarter:])
    slower = last[len(last) // 2] / first[len(first) // 2]
    row = {"steps": STEPS, "kilobytes at 3,000": sizes[2], "at the end": sizes[-1],
           "milliseconds a step": round(1000 * sum(seconds) / STEPS, 2),
           "last quarter over first": round(slower, 2)}  # fmt: skip
    sys.stderr.write(f"\n  {json.dumps(row)}\n")
    assert grown < 2_000  # a tenth of a kilobyte a step would be seen
    assert slower < 1.3
