"""A linear layer of several weights: rows in groups, each with a weight of its own."""
