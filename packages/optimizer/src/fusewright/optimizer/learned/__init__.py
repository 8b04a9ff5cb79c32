"""The learned optimizer: a perceptron for each element."""
