"""A memory written and read token by token: memory_scan."""
