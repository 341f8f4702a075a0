"""The mathematics: tensors in, tensors out, nothing but torch and the standard library."""
