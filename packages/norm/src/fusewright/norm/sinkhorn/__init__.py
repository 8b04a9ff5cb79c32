"""Sinkhorn-Knopp normalisation of small square matrices."""
