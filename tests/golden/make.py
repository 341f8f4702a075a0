"""Golden outputs: what the commands and the public names said before the code was moved.

`python tests/golden/make.py` compares what they say now with `data/*.json`, and with `--write`
(after names of items, or for all) writes it there anew: only after a change of numbers that is
meant, and named in the commit.  Everything goes through `locater.cli.main` and `from locater
import ...`, so that no item depends on where a module lies.

Numbers agree bit for bit on the machine that wrote them.  An item whose arithmetic moved gets
`tolerance=1e-12` in `ITEMS` (relative, and absolute where a number is below 1).  On another
machine, where matrix products round otherwise, its `elsewhere` holds.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import nn

import locater
from locater.cli import main

DATA = Path(__file__).parent / "data"
LONG = 32
"""A longer list of numbers is kept as a digest, a sum and so many of them."""


def command(*arguments: str) -> str:
    """What a command prints."""
    out, talk = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
        code = main(arguments)
    assert code == 0, talk.getvalue()
    return out.getvalue()


@contextlib.contextmanager
def elsewhere() -> Iterator[Path]:
    """An empty folder to work in."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


SIZE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHARED = {**SIZE, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50}),
    "bert": ("BertConfig", SIZE),
    "llama": ("LlamaConfig", SHARED),
    "qwen3": ("Qwen3Config", {**SHARED, "head_dim": 16}),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50}),
    "t5": ("T5Config", {"d_model": 32, "num_heads": 4, "d_kv": 6, "d_ff": 48, "num_layers": 1}
           | {"vocab_size": 50}),
}  # fmt: skip


@cache
def family(name: str) -> nn.Module:
    """A tiny model in float64, every parameter drawn by a generator of its own."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config, settings = FAMILIES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModel.from_config(
            getattr(transformers, config)(**settings), attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(len(name))
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.copy_(drawn / fan_in**0.5 + (0.5 if parameter.ndim < 2 else 0))
    return model


def audit(name: str, *flags: str) -> Any:
    """`locater audit --json` on a tiny model."""
    with elsewhere():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            family(name).save_pretrained("model")
        return json.loads(command("audit", "model", "--tokens", "16", "--json", *flags))


def compare() -> Any:
    """`locater compare --json` of a tiny model with itself, its queries larger."""
    model = deepcopy(family("llama"))
    with elsewhere():
        model.save_pretrained("before")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(1.25 if "q_proj" in name else 1.0)
        model.save_pretrained("after")
        return json.loads(command("compare", "before", "after", "--tokens", "16", "--json"))


def ids(blocks: int, tokens: int) -> torch.Tensor:
    """Words of a text that walks slowly through its vocabulary."""
    generator = torch.Generator().manual_seed(7)
    steps = torch.randint(-2, 3, (blocks, tokens), generator=generator)
    return 3 + steps.cumsum(-1) % 40


def reality(name: str) -> Any:
    """`against_theory` on a tiny model."""
    config = locater.RealityConfig(draws=50, exact=name == "gpt2")
    with torch.no_grad():
        found = locater.against_theory(family(name), ids(64, 8), config)
    return {
        "summary": found.summary(),
        "layers": untimed(found.layer_rows()),
        "heads": found.rows(),
        "skipped": len(found.skipped),
    }


def probe(name: str) -> Any:
    """What a `Probe` measures in two passes of a tiny model."""
    model = family(name)
    with locater.Probe(model) as watching, torch.no_grad():
        for batch in ids(8, 12).split(4):
            model(input_ids=batch)
        return {
            "heads": [head.as_dict() for head in watching.records],
            "rank": [vars(one) for one in watching.rank],
            "metrics": watching.metrics(),
        }


def penalty(name: str) -> Any:
    """LocAteR's penalty on a tiny model, and its gradient."""
    model, told = family(name), {}
    for config in (
        locater.LocAteRConfig(scale_strength=100.0, mean_strength=1.0),
        locater.LocAteRConfig(scale_strength=1.0, mean_strength=100.0, target=0.5),
    ):
        value = locater.LocAteR(model, config).penalty()
        value.backward()  # type: ignore[no-untyped-call]
        gradient = {
            name: one.grad.square().sum().item()
            for name, one in model.named_parameters()
            if one.grad is not None
        }
        told[str(config.target)] = {"penalty": value.item(), "gradient": gradient}
        model.zero_grad()
    return told


def theory(xi: str, eta: str, process: str) -> Any:
    """`locater theory --json`."""
    flags = ("--tokens", "24", "--dim", "64", "--process", process)
    return json.loads(command("theory", "--xi", xi, "--eta", eta, *flags, "--json"))


def simulated() -> Any:
    """`locater simulate --json` on all panels of Fig. 5, small, and the records of its chart."""
    sizes = ("--draws", "2", "--sequences", "20", "--model", "8", "--tokens", "6")
    with elsewhere():
        flags = ("fig5", *sizes, "--workers", "1", "--store", "store", "--out", "chart.json")
        said = json.loads(command("simulate", *flags, "--json"))
        return {"said": said, "chart": chart_data(json.loads(Path("chart.json").read_text()))}


def figures() -> Any:
    """The records and verdicts behind `reproduce --only fig1,fig2,fig3,fig4,claims`."""
    names = ("fig1", "fig2", "fig3", "fig4", "claims")
    with elsewhere():
        command("reproduce", "--only", ",".join(names), "--out", "out", "--no-exports")
        parts = {name: next(Path("out/parts").glob(f"{name}-*.json")).read_text() for name in names}
    made = {name: json.loads(text)["kept"] for name, text in parts.items()}
    return {
        name: {
            "charts": {one["key"]: chart_data(one["chart"]) for one in part["sections"]},
            "verdicts": [[one["where"], one["outcome"], one["found"]] for one in part["verdicts"]],
        }
        for name, part in made.items()
    }


def chart_data(spec: Any) -> list[Any]:
    """Every list of records in a chart, in order."""
    if isinstance(spec, list):
        return [found for one in spec for found in chart_data(one)]
    if not isinstance(spec, dict):
        return []
    own = [spec["values"]] if isinstance(spec.get("values"), list) else []
    own = [one for one in own if one and isinstance(one[0], dict)]
    named = list(spec.get("datasets", {}).values())
    return own + named + [found for key, one in spec.items() if key != "datasets"
                          for found in chart_data(one)]  # fmt: skip


def text() -> str:
    """A text to train on: some words are frequent, and each tells something of the next."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(8_000, generator=generator, dtype=torch.float64).square()
    words = [f"w{int(600 * one)}" for one in ((drawn + drawn.roll(1)) / 2).tolist()]
    return "\n".join(" ".join(words[k : k + 12]) for k in range(0, len(words), 12))


def training() -> Any:
    """The metrics of 100 steps of `locater train`, to their 6 digits."""
    with elsewhere():
        Path("text.txt").write_text(text())
        sizes = ("--steps", "100", "--measure-every", "10", "--layers", "2", "--mean-strength", "1")
        command("train", "--preset", "tiny", "--data", "text.txt", *sizes, "--out", "run")
        lines = Path("run/metrics.jsonl").read_text().splitlines()
    return [untimed(json.loads(line)) for line in lines]


def sweep() -> Any:
    """`locater sweep tiny --json`."""
    with elsewhere():
        Path("text.txt").write_text(text())
        flags = ("--data", "text.txt", "--out", "runs", "--workers", "1", "--json")
        return json.loads(command("sweep", "tiny", *flags))


def untimed(data: Any) -> Any:
    """Without what a clock said, and who it was."""
    if isinstance(data, dict):
        left = ("second", "time", "digest", "speed", "commit", "environment")
        return {k: untimed(v) for k, v in data.items() if not any(word in k for word in left)}
    return [untimed(one) for one in data] if isinstance(data, list) else data


@dataclass(frozen=True)
class Item:
    """How an output is made, and how near it has to come."""

    make: Callable[[], Any]
    tolerance: float = 0.0
    """0 is bit for bit; 1e-12 for arithmetic that moved."""
    elsewhere: float = 1e-6
    """On a machine that rounds otherwise."""


MOVED = 1e-12
"""Since audit, theory and penalty sum traces and Grams in one place; by 3e-15 at most."""
ITEMS: dict[str, Item] = {
    **{f"audit-{name}": Item(partial(audit, name), MOVED) for name in FAMILIES},
    "audit-walk": Item(partial(audit, "bert", "--process", "random-walk", "--no-gains"), MOVED),
    # deviations are differences of float32 numbers over a spread that is small among four heads
    "audit-exact": Item(
        partial(audit, "gpt2", "--exact", "--process", "autoregressive"), MOVED, elsewhere=1e-5
    ),
    "compare": Item(compare, MOVED),
    "theory-late": Item(partial(theory, "5", "0.1", "random-walk"), MOVED),
    "theory-middle": Item(partial(theory, "0", "1", "autoregressive"), MOVED),
    "simulate": Item(simulated, MOVED, elsewhere=0.1),  # a count may fall to the other side
    "figures": Item(figures, MOVED),
    "reality-gpt2": Item(partial(reality, "gpt2"), MOVED, elsewhere=0.1),
    "reality-llama": Item(partial(reality, "llama"), MOVED, elsewhere=0.1),
    "probe-gpt2": Item(partial(probe, "gpt2")),
    "probe-llama": Item(partial(probe, "llama")),
    "penalty-gpt2": Item(partial(penalty, "gpt2")),
    "penalty-llama": Item(partial(penalty, "llama")),
    "train": Item(training, elsewhere=0.1),  # float32, and every step feeds the next
    "sweep": Item(sweep, elsewhere=0.1),
}


def made(name: str) -> Any:
    """An item as it is stored."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = ITEMS[name].make()
    finally:
        torch.set_num_threads(threads)
    return json.loads(json.dumps(packed(data)))


def packed(data: Any) -> Any:
    """Records as columns, long lists as digests, sentences as the numbers in them."""
    if isinstance(data, torch.Tensor):
        return packed(data.tolist())
    if isinstance(data, dict):
        return {str(key): packed(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return _packed_list(list(data))
    if isinstance(data, str) and data.count(" ") > 3:
        return {"numbers": re.findall(r"\d[\d.]*\d|\d", data)}
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    assert data is None or isinstance(data, bool | int | float | str), type(data)
    return data


def _packed_list(data: list[Any]) -> Any:
    if data and all(isinstance(one, dict) and one.keys() == data[0].keys() for one in data):
        return {key: packed([one[key] for one in data]) for key in data[0]}
    flat = _flat(data)
    numbers = [one for one in flat if isinstance(one, int | float)]
    if len(flat) <= LONG:
        return [packed(one) for one in data]
    if len(numbers) < 0.5 * len(flat):
        return packed(" ".join(map(str, flat))) if _are_texts(flat) else [packed(d) for d in data]
    kept = [flat[round(k * (len(flat) - 1) / (LONG // 2 - 1))] for k in range(LONG // 2)]
    whole = [one for one in numbers if math.isfinite(one)]
    return {
        "shape": f"{len(data)} of {len(flat)}",
        "digest": blake2b(json.dumps(flat).encode(), digest_size=12).hexdigest(),
        "sum": math.fsum(whole),
        "size": math.fsum(map(abs, whole)),
        "some": [packed(one) for one in kept],
    }


def _are_texts(flat: list[Any]) -> bool:
    return all(isinstance(one, str) for one in flat)


def _flat(data: Any) -> list[Any]:
    return [leaf for one in data for leaf in _flat(one)] if isinstance(data, list) else [data]


def home() -> str:
    """A digest of what decides how numbers are rounded."""
    cpu = Path("/proc/cpuinfo")
    model = re.search(r"model name.*", cpu.read_text()) if cpu.exists() else None
    capability = torch.backends.cpu.get_cpu_capability()
    words = [torch.__config__.show(), capability, platform.machine(), model and model.group()]
    return blake2b(json.dumps(words).encode(), digest_size=8).hexdigest()


def differences(stored: Any, found: Any, tolerance: float, place: str = "") -> list[str]:
    """Where two packed outputs disagree; without a tolerance, by a single bit."""
    if isinstance(stored, dict) and isinstance(found, dict):
        if stored.keys() != found.keys():
            return [f"{place}: {sorted(stored)} became {sorted(found)}"]
        keys = [key for key in stored if key != "digest" or not tolerance]
        pairs = [(f"{place}.{key}", stored[key], found[key]) for key in keys]
    elif isinstance(stored, list) and isinstance(found, list):
        if len(stored) != len(found):
            return [f"{place}: {len(stored)} entries became {len(found)}"]
        pairs = [(f"{place}[{k}]", *both) for k, both in enumerate(zip(stored, found, strict=True))]
    else:
        return [] if _agree(stored, found, tolerance) else [f"{place}: {stored!r} became {found!r}"]
    return [told for where, a, b in pairs for told in differences(a, b, tolerance, where)]


def _agree(stored: Any, found: Any, tolerance: float) -> bool:
    numbers = all(isinstance(one, int | float) for one in (stored, found))
    if not numbers or not tolerance:
        return type(stored) is type(found) and stored == found
    return math.isclose(stored, found, rel_tol=tolerance, abs_tol=tolerance)


def check(name: str) -> list[str]:
    """Where an item is no longer what it was."""
    path, item = DATA / f"{name}.json", ITEMS[name]
    stored = json.loads(path.read_text(encoding="utf-8"))
    tolerance = item.tolerance if stored["home"] == home() else item.elsewhere
    return differences(stored["output"], made(name), tolerance, name)


def write(name: str) -> None:
    """Keep an item as it is now."""
    DATA.mkdir(exist_ok=True)
    output = json.dumps(made(name), ensure_ascii=False)
    text = f'{{"home": "{home()}",\n"output": {output}}}\n'
    (DATA / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    names = [one for one in sys.argv[1:] if not one.startswith("--")] or list(ITEMS)
    wrong = [] if "--write" in sys.argv else [told for name in names for told in check(name)]
    for name in names if "--write" in sys.argv else ():
        write(name)
    sys.stdout.write("\n".join([*wrong, f"{len(names)} items, {len(wrong)} differences"]) + "\n")
    sys.exit(bool(wrong))
