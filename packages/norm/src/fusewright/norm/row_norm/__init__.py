"""Norms of the rows of a tensor: rms_norm, add_rms_norm, rms_norm_gated and layer_norm."""
