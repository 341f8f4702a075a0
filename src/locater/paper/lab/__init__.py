"""The laboratory: data, the paper's transformer, its training, rivals and sweeps."""
