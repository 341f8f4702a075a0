"""What do the biases of queries and keys do in trained models of the laboratory?

python benchmarks/study_biases.py RUN… --data FOLDER     # run folders; adds to results/biases.json

Each model is measured as it was trained, then with the bias of its queries, and with that of its
keys, set to zero: ρ of the last query in quarters of the tokens, the ρ that theory predicts from
the tokens and the biases, attention entropy, the largest logit, and the loss on all of valid.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from locater.engines import one_thread
from locater.files import write_file
from locater.paper.lab.model import Transformer
from locater.paper.lab.run import Run, rounded
from locater.paper.lab.train import Meter, load_trained

OUT = Path(__file__).parents[1] / "results" / "biases.json"
VARIANTS = {"as trained": "", "query bias 0": "q_proj.bias", "key bias 0": "k_proj.bias"}


def quarters(rho: list[list[float]]) -> list[float]:
    """Means over layers and over a quarter of the tokens each."""
    return [part.mean().item() for part in torch.tensor(rho).mean(0).tensor_split(4)]


def measured(model: Transformer, meter: Meter) -> dict[str, Any]:
    found = meter.measure(predicts=True)
    return {
        "entropy": found["entropy"],
        "rho": quarters(found["rho"]),
        "predicted_rho": quarters(found["predicted_rho"]),
        "max_logit": found["max_logit"],
        "frobenius_squared": found["frobenius_squared"],
        "whole_valid_loss": meter.loss(meter.whole),
    }


def study(path: Path, data: str) -> dict[str, Any]:
    run = Run.load(path)
    model, material = load_trained(path, data=data)
    meter = Meter(model, material.valid, material.whole_valid, torch.device("cpu"))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    variants = {}
    for label, ending in VARIANTS.items():
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ending and name.endswith(ending):
                    parameter.zero_()
        variants[label] = rounded(measured(model, meter))
        model.load_state_dict(kept)
    return {
        "commit": run.environment["commit"],
        "config": asdict(run.config),
        "variants": variants,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data", required=True)
    given = parser.parse_args()
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    with one_thread():
        for path in given.runs:
            name = Run.load(path).config.digest
            found[name] = study(path, given.data)
            print(name, json.dumps(found[name]["variants"], indent=1))
    write_file(OUT, json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
