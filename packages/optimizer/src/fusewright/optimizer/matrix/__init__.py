"""Optimizers over stacks of matrices of one shape: Muon, M3, delta and deep momentum."""
