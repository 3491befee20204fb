"""How parameters and activations are parted over ranks."""
