"""Grouped heads: networks of two layers over one shared input, three outputs each."""
