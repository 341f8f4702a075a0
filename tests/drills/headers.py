"""Mutated headers of safetensors, GGUF and zip, by the hundred thousand; prints what went wrong.

    python tests/drills/headers.py COUNT SEED

Every case opens a file with the program's own reader under a limit of memory and reads what it
lists.  A case is good if it ends in tensors or in a `LocaterError` with a hint, in time.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import signal
import struct
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import torch
from safetensors.torch import save

from locater.checkpoints.open import open_checkpoint
from locater.errors import LocaterError

SECONDS = 10
BYTES = 1 << 30  # beyond what the libraries hold
WEIGHTS = {f"layers.0.self_attn.{side}.weight": torch.ones(4, 4) for side in ("q_proj", "k_proj")}
NUMBERS = (0, 1, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def flipped(raw: bytearray, draw: random.Random, within: int) -> bytearray:
    """Change, drop, repeat or put in some bytes, or a whole number at any place."""
    for _ in range(draw.randint(1, 5)):
        place, kind = draw.randrange(min(within, len(raw)) or 1), draw.randrange(6)
        if kind == 0:
            raw[place : place + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del raw[place : place + draw.randint(1, 24)]
        elif kind == 2:
            raw[place:place] = draw.randbytes(draw.randint(1, 24))
        elif kind == 3:
            raw[place:place] = raw[place : place + draw.randint(1, 128)]
        else:
            size = draw.choice((2, 4, 8))
            number = draw.choice(NUMBERS) % (1 << 8 * size)
            raw[place : place + size] = number.to_bytes(size, "little")
    return raw if draw.random() < 0.9 else raw[: draw.randrange(len(raw) or 1)]


SAFETENSORS = save(WEIGHTS)


def safetensors(draw: random.Random) -> bytes:
    """Bytes changed, or a header with fields that lie."""
    if draw.random() < 0.6:
        return bytes(flipped(bytearray(SAFETENSORS), draw, 300))
    length = int.from_bytes(SAFETENSORS[:8], "little")
    header = json.loads(SAFETENSORS[8 : 8 + length])
    entry = header[draw.choice([name for name in header if name != "__metadata__"])]
    field = draw.choice(list(entry))
    lies: list[object] = [draw.choice(NUMBERS), [draw.choice(NUMBERS)] * draw.randint(0, 9), None,
                          "F64", "F4", [-1, 4], {}, "\ud800", [[4], 4], 1e300]  # fmt: skip
    entry[field] = draw.choice(lies)
    if draw.random() < 0.2:
        header = {draw.choice(["..", "/etc/passwd", "a" * 70_000, "\ud800", ""]): entry} | header
    text = json.dumps(header).encode()
    if draw.random() < 0.2:
        text = b'{"a":' * draw.choice((5, 1000, 100_000)) + text
    return struct.pack("<Q", len(text)) + text + SAFETENSORS[8 + length :]


def _gguf() -> bytes:
    import gguf

    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_head_count(2)
        writer.add_array("tokenizer.words", ["a", "b"])
        for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
            writer.add_tensor(name, numpy.ones((4, 4), dtype=numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


GGUF = _gguf()


def gguf(draw: random.Random) -> bytes:
    """Bytes and counts changed."""
    raw = bytearray(GGUF)
    if draw.random() < 0.3:  # how many tensors and how many pairs of metadata there are
        at = draw.choice((8, 16))
        raw[at : at + 8] = draw.choice(NUMBERS).to_bytes(8, "little")
    return bytes(flipped(raw, draw, 400))


def _torch_zip() -> bytes:
    held = io.BytesIO()
    torch.save(WEIGHTS, held)
    return held.getvalue()


ZIP = _torch_zip()


def zipped(draw: random.Random) -> bytes:
    """A PyTorch file with lies in its directory, compressed bombs, other paths, zips in zips."""
    kind = draw.randrange(4)
    if kind == 0:
        return bytes(flipped(bytearray(ZIP), draw, len(ZIP)))
    if kind == 1:  # the directory at the end: sizes, offsets, counts, zip64
        raw = bytearray(ZIP)
        start = raw.find(b"PK\x01\x02")
        tail = flipped(raw[start:], draw, len(raw) - start)
        return bytes(raw[:start] + tail)
    held = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ZIP)) as old, zipfile.ZipFile(held, "w") as new:
        for part in old.infolist():
            data = old.read(part)
            if draw.random() < 0.3:
                data = draw.choice((b"", data[:-3], ZIP, b"\x80\x02" + draw.randbytes(20)))
            name = part.filename
            if draw.random() < 0.3:
                ways = ("../../" + name, "/" + name, name * 300, name.replace("archive", ".."))
                name = draw.choice(ways)
            is_bomb = kind == 3 and draw.random() < 0.5
            packing = zipfile.ZIP_DEFLATED if is_bomb else zipfile.ZIP_STORED
            new.writestr(zipfile.ZipInfo(name), BOMB if is_bomb else data, packing)
    return held.getvalue()


BOMB = bytes(1 << 19)
KINDS: dict[str, tuple[str, Callable[[random.Random], bytes]]] = {
    "safetensors": ("model.safetensors", safetensors),
    "gguf": ("model.gguf", gguf),
    "zip": ("pytorch_model.bin", zipped),
}


def tried(path: Path) -> tuple[str, str | None]:
    """How the reader took it, and what was wrong with that."""
    signal.alarm(SECONDS)
    try:
        with open_checkpoint(path) as found:
            for name in list(found.shapes)[:8]:
                found.read([name])
        return "read", None
    except LocaterError as error:
        return "refused", None if error.hint else f"no hint: {error.message}"
    except BaseException as error:  # noqa: BLE001  (whatever escapes is what is looked for)
        return "escaped", f"{type(error).__name__}: {error!s:.300}"
    finally:
        signal.alarm(0)


def run(count: int, seed: int) -> int:
    """Try so many; prints a table, returns how many were not good."""

    def hang(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, hang)
    held = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (held + BYTES, held + BYTES))
    table: Counter[tuple[str, str]] = Counter()
    began, bad, slowest = time.monotonic(), 0, 0.0
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for place in range(count):
            draw = random.Random(f"{seed} {place}")
            kind = draw.choice(list(KINDS))
            name, make = KINDS[kind]
            path = Path(folder) / name
            path.write_bytes(make(draw))
            start = time.monotonic()
            how, wrong = tried(path)
            slowest = max(slowest, time.monotonic() - start)
            table[kind, how] += 1
            if wrong is not None:
                bad += 1
                print(json.dumps({"kind": kind, "case": f"{seed} {place}", "wrong": wrong}))  # noqa: T201
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({  # noqa: T201
        "tried": count, "bad": bad, "seconds": round(time.monotonic() - began, 1),
        "slowest": round(slowest, 2), "peak_megabytes": peak,
        **{" ".join(key): number for key, number in sorted(table.items())},
    }))  # fmt: skip
    return bad


if __name__ == "__main__":
    sys.exit(bool(run(int(sys.argv[1]), int(sys.argv[2]))))
