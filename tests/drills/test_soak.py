"""A probe on every step of a long training: no memory kept, no step slower than the first.

In a process of its own, as a training is, so that what other tests left does not count.  Python's
objects come from malloc there too (PYTHONMALLOC), so that malloc's count of the bytes in use is
exact for all; what a process has from the system is not, for malloc gives back when it likes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.drill
STEPS, PARTS = 20_000, 20
KEPT = 8  # bytes a step: the least that can be kept of one, a reference in a list
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
          "fordblks", "keepcost")  # fmt: skip


class Count(ctypes.Structure):
    """What glibc's mallinfo2 says."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def in_use() -> int:
    """Bytes that are held, mapped ones among them."""
    gc.collect()
    count = ctypes.CDLL(None).mallinfo2
    count.restype = Count
    now = count()
    return int(now.uordblks + now.hblkhd)


def train(steps: int, seed: int, leak: int) -> None:
    """Print bytes in use and seconds of each part; with a leak, so many are kept of every step."""
    import torch
    from torch import nn

    from locater import Probe

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held, seconds, kept = [0] * PARTS, [0.0] * PARTS, []
    with Probe(model, every=1, keep=0, generator=generator) as probe:
        for part in range(PARTS):
            began = time.process_time()
            for _ in range(steps // PARTS):
                tokens = torch.randn(2, 6, 8, generator=generator)
                optimizer.zero_grad()
                model(tokens).square().mean().backward()
                optimizer.step()
                if leak:
                    kept.append(bytes(leak))
            seconds[part] = time.process_time() - began
            held[part] = in_use()
    assert probe.records
    assert all(len(module._forward_hooks) == 0 for module in model.modules())
    sys.stdout.write(json.dumps({"held": held, "seconds": seconds}))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize(("steps", "leak"), [(STEPS, 0), (STEPS // 10, 200)])
def test_twenty_thousand_probed_steps(steps: int, leak: int, seed: int) -> None:
    """Flat; and a few hundred bytes a step would be seen."""
    program = [sys.executable, __file__, str(steps), str(seed), str(leak)]
    env = os.environ | {"PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=env, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    held, seconds, settled, quarter = found["held"], found["seconds"], PARTS // 5, PARTS // 4
    grown = (held[-1] - held[settled - 1]) / (steps * (PARTS - settled) / PARTS)
    first, last = sorted(seconds[:quarter]), sorted(seconds[-quarter:])
    slower = last[quarter // 2] / first[quarter // 2]
    row = {"steps": steps, "kilobytes after a fifth": held[settled - 1] / 1024,
           "at the end": held[-1] / 1024, "bytes a step": round(grown, 2),
           "milliseconds a step": round(1000 * sum(seconds) / steps, 2),
           "last quarter over first": round(slower, 2)}  # fmt: skip
    sys.stderr.write(f"\n  {json.dumps(row)}\n")
    if leak:
        assert grown > leak
    else:
        assert grown < KEPT
        assert slower < 1.3


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
