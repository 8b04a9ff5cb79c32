"""One pooled step of a memory on all its rows at once: memory_update."""
