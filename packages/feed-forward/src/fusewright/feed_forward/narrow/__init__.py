"""A linear layer of few input columns with SiLU behind it."""
