"""Reading a memory without writing it: memory_read."""
