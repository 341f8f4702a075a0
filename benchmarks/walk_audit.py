"""How far an audit walks: the modules that `locater audit` passes, and how often it turns back.

python benchmarks/walk_audit.py [--path] [FOLDER]

A tiny Llama (two layers, four heads) is audited under `sys.setprofile`.  Every call from one module
of ours into another is a step; a step that has been taken before (the next layer, the next head) is
not counted again.  A **return** is a step into a room (a package of ours, or a module that stands
alone) that the walk has been in before and had left.  `--path` prints the steps.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

Step = tuple[str, str]


def walk(arguments: list[str]) -> list[Step]:
    """The distinct steps of a command between our modules, in the order they are first taken."""
    from locater.cli import main

    steps: dict[Step, None] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not _is_ours(frame):
            return
        caller = frame.f_back
        while caller is not None and not _is_ours(caller):  # through libraries that call us back
            caller = caller.f_back
        names = [one.f_code.co_name for one in (frame, caller) if one is not None]
        if len(names) == 2 and "<module>" not in names:  # not what an import runs
            before, here = (str(one.f_globals["__name__"]) for one in (caller, frame) if one)
            if before != here:
                steps.setdefault((before, here))

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.setprofile(watch)
        try:
            code = main(arguments)
        finally:
            sys.setprofile(None)
    assert code == 0
    return list(steps)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("locater.")


def room(module: str) -> str:
    """`locater.audit.table` is in the room `audit`."""
    return module.split(".")[1]


def returns(steps: list[Step]) -> list[Step]:
    """The steps that lead back into a room."""
    seen, found = {room(steps[0][0])}, []
    for before, here in steps:
        if room(here) != room(before) and room(here) in seen:
            found.append((before, here))
        seen.add(room(here))
    return found


def write_model(folder: Path) -> None:
    """The tiny checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)


def main() -> None:
    given = [word for word in sys.argv[1:] if not word.startswith("--")]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given[0]) if given else Path(made)
        if not given:
            write_model(folder)
        steps = walk(["audit", str(folder), "--tokens", "64"])
    back = returns(steps)
    modules = dict.fromkeys(module for step in steps for module in step)
    rooms = dict.fromkeys(map(room, modules))
    print(f"{len(modules)} modules in {len(rooms)} rooms ({', '.join(rooms)});")
    print(f"{len(steps)} steps between modules, {len(back)} of them back into a room")
    if "--path" in sys.argv:
        for before, here in steps:
            print(f"{'<' if (before, here) in back else ' '} {before} → {here}")


if __name__ == "__main__":
    main()
