"""A linear layer of few columns with SiLU behind it."""
