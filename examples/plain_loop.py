"""LocAteR in a loop of one's own: a small encoder, its penalty and its task in one backward."""

import torch
from torch import nn

from locater import LocAteR, LocAteRConfig

generator = torch.Generator().manual_seed(0)
model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
# hold tr(W_QK) at three temperatures: beyond two, theory says, attention localizes
config = LocAteRConfig(
    scale_strength=0.1, mean_strength=1.0, target=3.0, target_unit="temperature", reduce="mean"
)
regularizer = LocAteR(model, config)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
print(f"r before: {regularizer.metrics()['locater/layer_0/r']:.3f}")
for _ in range(100):
    inputs = torch.randn(8, 12, 32, generator=generator)
    targets = inputs.roll(1, dims=1)
    loss = regularizer.penalty() + nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
temperature = 8**0.5  # √head_dim
rest = config.equilibrium(8, temperature=temperature) / temperature
print(f"r after: {regularizer.metrics()['locater/layer_0/r']:.3f} (the penalty's own: {rest:.3f})")
