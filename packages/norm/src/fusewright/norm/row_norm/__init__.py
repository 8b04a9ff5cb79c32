"""rms_norm and layer_norm of the rows of a tensor, and of a sum; rms_norm_gated."""
