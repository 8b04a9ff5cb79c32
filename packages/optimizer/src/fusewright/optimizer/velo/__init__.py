"""VeLO: a perceptron for each tensor, mixed by an LSTM."""
