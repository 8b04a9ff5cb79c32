"""The norm of gradients, and their clipping."""
