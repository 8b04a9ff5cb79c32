"""Attention to selected keys: sparse_attention and sparse_attention_with_lse."""
