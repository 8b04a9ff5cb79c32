"""The module that turns rows into Gaussian mixtures."""
