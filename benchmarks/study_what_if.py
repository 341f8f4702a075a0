"""What-ifs on real models, against the truth: makes results/what-if/NAME.json.

python benchmarks/study_what_if.py MODEL TEXT --name smollm2 --tokens 128 --blocks 400 \\
    --lengths 512 1024 --truth 48 [--yarn 4]
python benchmarks/study_what_if.py MODEL TEXT --name demo --tokens 64 --adapter CODE
python benchmarks/study_what_if.py --page docs/what-if.md
Moments come from short blocks of the first half of the text.  The truth is the model itself, run on
blocks of the other length from the second half (with --yarn, with its positions changed; with
--adapter, at the same length with a LoRA of rank 8 on every layer that was trained on CODE).
Baselines: the short entropy copied, plus ln of the ratio of the lengths, in proportion to ln T.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from studies import has_page, study_parser
from study_interventions import adapted

from locater.files import write_file
from locater.models.live import find_attention
from locater.models.loading import load_model, read_text, text_blocks
from locater.probe.samples import collect
from locater.reality.what_if import Change, Moments, change_bar, look, moments, what_if
from locater.report.tables import markdown_table

ADAPTERS = {"W_Q and W_K": ["q_proj", "k_proj"], "all matrices": "all-linear"}


def main() -> None:
    parser = study_parser(__doc__, "what-if", tokens=128, blocks=400)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512])
    parser.add_argument("--truth", type=int, default=48, help="blocks of each length")
    parser.add_argument("--yarn", type=float, default=0.0)
    parser.add_argument("--adapter", type=Path, help="the text of LoRAs to train; no lengths then")
    parser.add_argument("--steps", type=int, default=150, help="of an adapter's training")
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--layers", default=None)
    given = parser.parse_args()
    if has_page(given, table, load):
        return
    model, tokenizer = load_model(given.model)
    text = read_text(given.text)
    first, second = text[: len(text) // 2], text[len(text) // 2 :]
    short = text_blocks(tokenizer, first, tokens=given.tokens, blocks=given.blocks)
    known = moments(model, short, name=given.name, layers=given.layers)
    path = known.save(given.out / f"{given.name}.safetensors")
    size = path.stat().st_size
    path.unlink()
    held_out = text_blocks(tokenizer, second, tokens=given.tokens, blocks=4 * given.truth)
    before = truth(model, given, held_out)
    result: dict[str, Any] = {
        "model": given.name,
        "tokens": given.tokens,
        "blocks": len(short),
        "moments_bytes": size,
        "here": compared(known, Change(), before, before, given.draws),
    }
    for words, modules in ADAPTERS.items() if given.adapter else ():
        with TemporaryDirectory() as folder:
            after = truth(adapted(given, modules, Path(folder)), given, held_out)
            known = moments(model, short, name=given.name, layers=given.layers, adapter=folder)
            key = f"{given.tokens}, LoRA on {words}"
            result[key] = compared(known, Change(adapter=folder), before, after, given.draws)
        write_file(given.out / f"{given.name}-lora.json", json.dumps(result, indent=1))
    for length in () if given.adapter else given.lengths:
        change = Change(tokens=length, rope_scaling=f"yarn:{given.yarn:g}" if given.yarn else "")
        long = text_blocks(tokenizer, second, tokens=length, blocks=given.truth)
        if given.yarn:
            stretch(model, given.yarn)
        after = truth(model, given, long)
        key = f"{length}, yarn {given.yarn:g}" if given.yarn else str(length)
        result[key] = compared(known, change, before, after, given.draws)
        print(key, json.dumps(result[key]["summary"], indent=1), flush=True)
        stored = given.out / f"{given.name}{'-yarn' if given.yarn else ''}.json"
        write_file(stored, json.dumps(result, indent=1))


def stretch(model: Any, factor: float) -> None:
    """Give a Llama the frequencies that its own library computes for yarn."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model.config
    config.rope_parameters = {
        **(getattr(config, "rope_parameters", None) or {}),
        "rope_type": "yarn", "factor": factor,
        "original_max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq, module.attention_scaling = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")


def truth(model: Any, given: Any, blocks: torch.Tensor) -> list[dict[str, Any]]:
    """What the last query of every head did, by the model's own logits."""
    found = [
        one
        for one in find_attention(model, layers=given.layers)
        if one.layout.kind == "self" and one.module is not None
    ]
    rows = []
    for sample in collect(model, found, blocks, keep=0, batch=2):
        for head in range(sample.logits.shape[1]):
            seen = look(sample.logits[:, head].double())
            rows.append({"layer": sample.attention.layout.layer, "head": head, **asdict(seen)})
    return rows


def compared(
    known: Moments,
    change: Change,
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    draws: int,
) -> dict[str, Any]:
    """Errors of the prediction and of what needs no theory, over heads."""
    found = what_if(known, change, draws=draws)
    ratio = math.log(found.tokens) / math.log(known.layers[0].tokens)
    longer = math.log(found.tokens / known.layers[0].tokens)
    rows = []
    for ours, short, long in zip(found.rows, before, after, strict=True):
        assert (ours["layer"], ours["head"]) == (long["layer"], long["head"])
        predicted = {name.removesuffix("_after"): value for name, value in ours.items()
                     if name.endswith("_after")}  # fmt: skip
        rows.append({"layer": long["layer"], "head": long["head"], "ours": predicted,
                     "short": short, "truth": long})  # fmt: skip

    def entropy(value: Any) -> dict[str, float]:
        gaps = torch.tensor(
            [abs(value(row) - row["truth"]["entropy"]) for row in rows], dtype=torch.float64
        )
        return {"mean": gaps.mean().item(), "median": gaps.median().item(),
                "p90": gaps.quantile(0.9).item(), "worst": gaps.max().item()}  # fmt: skip

    reach = [abs(row["ours"]["largest"] / row["truth"]["largest"] - 1) <= 0.1 for row in rows]
    noise = sum(row["truth"]["entropy_error"] for row in rows) / len(rows)
    summary = {
        "heads": len(rows),
        "entropy_error_ours": entropy(lambda row: row["ours"]["entropy"]),
        "entropy_error_copy": entropy(lambda row: row["short"]["entropy"]),
        "entropy_error_plus_ln": entropy(lambda row: row["short"]["entropy"] + longer),
        "entropy_error_in_proportion": entropy(lambda row: row["short"]["entropy"] * ratio),
        "entropy_standard_error_of_the_truth": noise,
        "largest_logit_within_10_percent": sum(reach) / len(reach),
        "sink_error": sum(
            abs(row["ours"]["sink_mass"] - row["truth"]["sink_mass"]) for row in rows
        ) / len(rows),
    }  # fmt: skip
    return {"summary": summary, "heads": rows}


def load(folder: Path) -> dict[str, Any]:
    """The studies that are there, by the name of their file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def table(studies: dict[str, Any], _: str) -> str:
    """Mean (90th percentile) errors of entropy and what else was asked, one row for each change."""
    lines = []
    for study in studies.values():
        for name, item in study.items():
            if not isinstance(item, dict):
                continue
            short = study["tokens"]
            words = name if name.startswith(f"{short},") else f"{short} → {name}"
            words = f"{short}, other text" if name == "here" else words
            ratio = 1.0 if name == "here" else float(name.partition(",")[0]) / short
            changes = moved(item["heads"], study["here"]["heads"])
            lines.append([study["model"], words, *_cells(item["summary"], changes, ratio)])
    errors = ["ours", "before + our change", "copy", "+ ln of the ratio", "∝ ln T"]
    titles = ["model", "tokens", "heads", *errors, "noise of the truth", "correlation of changes",
              "within the bar", "largest logit within 10 %", "error of the sink"]  # fmt: skip
    return markdown_table(lines, titles) + "\n"


def moved(rows: list[dict[str, Any]], here: list[dict[str, Any]]) -> torch.Tensor:
    """Changes of entropy, predicted and measured, from the short blocks to these."""
    return torch.tensor(
        [
            [row["ours"]["entropy"] - start["ours"]["entropy"],
             row["truth"]["entropy"] - row["short"]["entropy"]]
            for row, start in zip(rows, here, strict=True)
        ],
        dtype=torch.float64,
    )  # fmt: skip


def _cells(summary: dict[str, Any], changes: torch.Tensor, ratio: float) -> list[str]:
    gaps = (changes[:, 0] - changes[:, 1]).abs()
    anchored = {"mean": gaps.mean().item(), "p90": gaps.quantile(0.9).item()}
    baselines = [summary[f"entropy_error_{one}"] for one in ("copy", "plus_ln", "in_proportion")]
    held = [
        gap <= change_bar(change, ratio)
        for gap, change in zip(gaps.tolist(), changes[:, 0].tolist(), strict=True)
    ]
    found = [summary["entropy_error_ours"], anchored, *baselines]
    correlation = torch.corrcoef(changes.T)[0, 1].item()
    return [
        str(summary["heads"]), *(f"{one['mean']:.2f} ({one['p90']:.2f})" for one in found),
        f"{summary['entropy_standard_error_of_the_truth']:.2f}",
        "" if math.isnan(correlation) else f"{correlation:.2f}", f"{sum(held) / len(held):.2f}",
        f"{summary['largest_logit_within_10_percent']:.2f}", f"{summary['sink_error']:.3f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
