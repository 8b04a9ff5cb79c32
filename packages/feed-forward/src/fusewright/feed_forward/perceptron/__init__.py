"""The feed-forward layer of two products with SiLU between them."""
