"""The model that a run has trained, for whoever wants to look into it."""

from __future__ import annotations

from pathlib import Path

from locater.errors import InputError
from locater.paper.lab.material import Material, load_material
from locater.paper.lab.model import Transformer
from locater.paper.lab.run import Run, RunFolder
from locater.paper.lab.stabilizers import apply_stabilizer


def load_trained(path: Path, *, data: str = "embedded") -> tuple[Transformer, Material]:
    """The model of a run's newest checkpoint, ready to evaluate, and the run's batches."""
    config = Run.load(path).config
    material = load_material(config, data)
    model = material.model(config)
    apply_stabilizer(
        model,
        config.stabilizer,
        max_logit=config.max_logit,
        decay=config.qk_decay,
        learning_rate=config.learning_rate,
    )
    checkpoint, damage = RunFolder(path, is_writer=False).restore()
    if checkpoint is None:
        raise InputError(
            f"{path} holds no whole checkpoint. {' '.join(damage)}".strip(),
            hint="train it with `locater train`; published results carry no models.",
        )
    model.load_state_dict(checkpoint.model)
    return model.eval(), material
