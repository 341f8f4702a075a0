"""LocAteR with Accelerate: GPT-2 from its config, gradients accumulated over four batches."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from locater import LocAteR, LocAteRConfig

accumulated = 4
accelerator = Accelerator(gradient_accumulation_steps=accumulated, cpu=True)
small = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(small)
texts = torch.randint(64, (256, 16), generator=torch.Generator().manual_seed(0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(texts, batch_size=4))
config = LocAteRConfig(scale_strength=0.1, mean_strength=1.0, target=4.0, reduce="mean")
regularizer = LocAteR(model, config)
print(f"trace before: {regularizer.metrics()['locater/global_trace']:.3f}")
for _ in range(3):
    for batch in batches:
        with accelerator.accumulate(model):
            penalty = regularizer.penalty()  # before the forward pass; backward() divides by 4
            accelerator.backward(penalty + model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
rest = config.equilibrium(16)
after = regularizer.metrics()["locater/global_trace"]
print(f"trace after: {after:.3f} (the penalty's own: {rest:.3f})")
