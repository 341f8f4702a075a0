"""LocAteR in Lightning: one callback; the module does not know of it."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from locater import LocAteR, LocAteRConfig
from locater.control.trainers import LocAteRLightning


class Shift(lightning.LightningModule):
    """Learns to repeat the previous token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """One batch's loss."""
        return nn.functional.mse_loss(self.encoder(batch), batch.roll(1, dims=1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Choose Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


tokens = torch.randn(256, 12, 32, generator=torch.Generator().manual_seed(0))
config = LocAteRConfig(scale_strength=0.1, mean_strength=1.0, target=4.0, reduce="mean")
module = Shift()
print(f"trace before: {LocAteR(module, config).metrics()['locater/global_trace']:.3f}")
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
callbacks = [LocAteRLightning(config)]
trainer = lightning.Trainer(accelerator="cpu", max_epochs=3, callbacks=callbacks, **quiet)
trainer.fit(module, DataLoader(tokens, batch_size=8))
after = trainer.logged_metrics["locater/global_trace"]
print(f"trace after: {after:.3f} (the penalty's own: {config.equilibrium(8):.3f})")
