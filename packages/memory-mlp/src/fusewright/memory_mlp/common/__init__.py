"""What two families of kernels use unchanged."""
