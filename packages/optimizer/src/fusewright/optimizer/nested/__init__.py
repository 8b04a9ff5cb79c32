"""AdamW whose learning rates by group a trained controller sets."""
