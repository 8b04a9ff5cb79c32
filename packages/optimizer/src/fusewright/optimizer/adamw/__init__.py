"""AdamW: all tensors of a dtype in one launch."""
