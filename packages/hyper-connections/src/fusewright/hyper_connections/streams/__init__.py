"""Residual streams around a layer: stream_read, stream_write, stream_coefficients."""
