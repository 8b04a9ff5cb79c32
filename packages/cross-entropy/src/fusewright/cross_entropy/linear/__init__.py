"""Cross entropy behind a linear layer: linear_cross_entropy."""
