"""The short causal convolution with its SiLU and the unit length of each head's columns."""
