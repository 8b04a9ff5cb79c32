"""The models, which know nothing of data, training or command lines."""
