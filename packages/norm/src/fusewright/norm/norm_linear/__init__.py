"""A norm of rows and the linear layer behind it."""
