"""Positions of tokens in queries and keys: rotary."""
