"""Theory against reality on real models: makes results/reality/*.json, the source of the figures.

python benchmarks/study_reality.py MODEL TEXT --name minilm --blocks 4000 [--other OTHER.txt]
MODEL is a folder, GGUF file or hub id; TEXT a plain text such as wikitext-2/train.txt.  Without
--other the second text is the prose of Python's own documentation, which every Python carries.
MODEL may also be a run of `locater train`; TEXT is then its --data, and valid is what is read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from locater.engines import one_thread
from locater.models.live import find_attention
from locater.models.loading import load_model, read_text, text_blocks
from locater.probe.samples import AttentionSamples, collect
from locater.reality.against_theory import (
    LayerReality,
    Reality,
    RealityConfig,
    averages,
    layer_against_theory,
)
from locater.report.reality_view import profile_records

QUICK = ("means", "rotary", "full_gaussian", "full", "given_query")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--name", required=True)
    parser.add_argument("--blocks", type=int, default=1600)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--other", default=None)
    parser.add_argument("--lengths", type=int, nargs="*", default=[])
    parser.add_argument("--length-blocks", type=int, default=400)
    parser.add_argument("--some", default=None, help="layers of the side studies, as a regex")
    parser.add_argument("--special", action="store_true")
    parser.add_argument("--cache", type=Path, help="keep the model's samples here for another run")
    parser.add_argument("--out", type=Path, default=Path("results/reality"))
    given = parser.parse_args()
    is_run = (Path(given.model) / "metrics.jsonl").exists()
    if is_run:
        model, blocks = _trained(Path(given.model), given.text, given.blocks)
        foreign = blocks[:0]
    else:
        model, tokenizer = load_model(given.model)
        text = read_text(given.text)
        cut = {"tokens": given.tokens, "special": given.special}
        blocks = text_blocks(tokenizer, text, blocks=given.blocks, **cut)
        foreign = text_blocks(tokenizer, _other(given.other), blocks=given.blocks // 8, **cut)
    split = len(blocks) // 2
    result: dict[str, Any] = {"model": given.name, "tokens": blocks.shape[1]}
    start = time.perf_counter()
    both = torch.cat([blocks, foreign])
    samples = _samples(model, both, split, given.cache)
    result["model_seconds"] = time.perf_counter() - start
    start = time.perf_counter()
    layers, sides = [], []
    some = {one.layout.name for one in _attentions(model, given.some) if not is_run}
    with one_thread():
        for place, sample in enumerate(samples):
            layers.append(layer_against_theory(_upto(sample, split, len(blocks)), RealityConfig()))
            if sample.attention.layout.name in some:
                sides.append(_side_studies(sample, split, len(blocks)))
            sample.inputs = sample.inputs[:0]
            _say(f"layer {place + 1}/{len(samples)}: {_short(layers[-1])}")
    result["theory_seconds"] = time.perf_counter() - start
    reality = Reality(layers, split, len(blocks) - split, blocks.shape[1], {})
    result |= {
        "summary": reality.summary(),
        "layers": reality.layer_rows(),
        "heads": [_lean(row) for row in reality.rows()],
        "quantiles": _quantiles(layers),
        "profiles": profile_records(reality),
        "side": {n: _merge([side[n] for side in sides]) for n in (sides[0] if sides else ())},
    }
    _write(given.out / f"{given.name}.json", result)
    for tokens in given.lengths:
        quick = RealityConfig(exact=False)
        cut["tokens"] = tokens
        short = text_blocks(tokenizer, text, blocks=given.length_blocks, **cut)
        seen = collect(model, _attentions(model, given.some), short, keep=len(short) // 2)
        with one_thread():
            rows = [row for one in seen for row in layer_against_theory(one, quick).rows()]
        result["side"].setdefault("tokens", {})[str(tokens)] = _means(rows)
        _say(f"T = {tokens}: {result['side']['tokens'][str(tokens)]}")
        _write(given.out / f"{given.name}.json", result)


def _other(path: str | None) -> str:
    if path is not None:
        return read_text(path)
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _trained(run: Path, data: str, count: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model of a run, and blocks of the text that it was not trained on."""
    from locater.paper.lab.train import load_trained

    model, material = load_trained(run, data=data)
    source = material.whole_valid
    blocks = torch.cat([source.at(step)[0] for step in range(source.steps_per_epoch)])
    return model, blocks[:count]


def _attentions(model: torch.nn.Module, layers: str | None) -> list[Any]:
    return [one for one in find_attention(model, layers=layers) if not one.layout.qk_norm]


def _samples(model: Any, blocks: torch.Tensor, keep: int, cache: Path | None) -> list[Any]:
    """Run the model, or read what it did from the cache."""
    attentions = _attentions(model, None)
    files = [] if cache is None else [cache / f"{place}.safetensors" for place in range(999)]
    files = files[: len(attentions)]
    if files and all(path.exists() for path in files):
        return [
            AttentionSamples(attention, **load_file(path))
            for attention, path in zip(attentions, files, strict=True)
        ]
    samples = collect(model, attentions, blocks, keep=keep, report=_talk)
    for path, sample in zip(files, samples, strict=False):  # no files without a cache
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"inputs": sample.inputs, "logits": sample.logits}, path)
    return samples


def _upto(sample: AttentionSamples, used: int, stop: int, start: int | None = None) -> Any:
    """Estimate on the first `used` blocks, measure on start:stop."""
    begin = len(sample.inputs) if start is None else start
    logits = torch.cat([sample.logits[:used], sample.logits[begin:stop]])
    return replace(sample, inputs=sample.inputs[:used], logits=logits)


def _side_studies(sample: AttentionSamples, split: int, whole: int) -> dict[str, Any]:
    """How the error depends on the blocks estimated on, and on the text measured on."""
    quick = RealityConfig(exact=False)
    result: dict[str, Any] = {}
    sizes = [size for size in (32, 64, 128, 256, 512) if size < split] + [split]
    result["blocks"] = {
        str(size): layer_against_theory(_upto(sample, size, whole), quick).rows() for size in sizes
    }
    other = _upto(sample, split, len(sample.logits), whole)
    result["other_text"] = {"other": layer_against_theory(other, quick).rows()}
    return result


def _merge(parts: list[dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    return {key: _means([row for part in parts for row in part[key]]) for key in parts[0]}


def _means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kept = averages(rows)
    names = [f"{kind}_{column}" for kind in ("rho_error", "entropy_error") for column in QUICK]
    result: dict[str, Any] = {name: round(kept[name], 4) for name in names if name in kept}
    return result | {"rho_noise": round(kept["rho_noise"], 4), "heads": len(rows)}


def _lean(row: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 4))


def _quantiles(layers: list[LayerReality]) -> list[dict[str, Any]]:
    return [
        {"layer": layer.layer, "kind": kind, "probability": probability, "quantile": value}
        for layer in layers
        for kind, shape in layer.features.items()
        for probability, value in shape.quantiles.items()
    ]


def _short(layer: LayerReality) -> str:
    row = averages(layer.rows())
    shown = [f"{c} {row[f'rho_error_{c}']:.4f}" for c in ("printed", layer.best, "exact", "full")]
    entropy = f"entropy {row[f'entropy_error_{layer.best}']:.3f} {row['entropy_error_full']:.3f}"
    return "; ".join([*shown, f"noise {row['rho_noise']:.4f}", entropy])


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_lean(data), ensure_ascii=False) + "\n")
    _say(f"wrote {path}")


def _talk(done: int, total: int) -> None:
    if done == total or done % 160 == 0:
        _say(f"blocks {done}/{total}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
