"""Attention of a sequence to a window of itself and to a prefix: sliding_window_attention."""
