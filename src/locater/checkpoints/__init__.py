"""Tensors by name from a file, a folder, a URL or the hub: nothing is executed."""
