"""Attention of queries to all keys of their task: rectangular_attention."""
