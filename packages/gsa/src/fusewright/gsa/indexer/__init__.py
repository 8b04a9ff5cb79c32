"""Scores of every query and key by a few small heads with one key: gated_indexer."""
