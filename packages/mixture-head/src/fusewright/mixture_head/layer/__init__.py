"""The module that computes Gaussian mixtures from rows."""
