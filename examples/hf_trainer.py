"""LocAteR in the Hugging Face Trainer: one more base class, one more argument."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from locater import LocAteRConfig
from locater.control.trainers import LocAteRMixin


class RegularizedTrainer(LocAteRMixin, Trainer):
    """The usual Trainer, with the penalty in its loss and `locater/…` in its logs."""


small = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
texts = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
config = LocAteRConfig(scale_strength=0.1, mean_strength=1.0, target=4.0, reduce="mean")
with tempfile.TemporaryDirectory() as out:
    arguments = TrainingArguments(
        out, max_steps=60, learning_rate=1e-2, logging_steps=20, report_to=[], use_cpu=True
    )
    trainer = RegularizedTrainer(
        model=GPT2LMHeadModel(small),
        args=arguments,
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        locater=config,
    )
    print(f"trace before: {trainer.regularizer.metrics()['locater/global_trace']:.3f}")
    trainer.train()
after = trainer.regularizer.metrics()["locater/global_trace"]
print(f"trace after: {after:.3f} (the penalty's own: {config.equilibrium(16):.3f})")
