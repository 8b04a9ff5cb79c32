"""The statistics of the learned optimizers, which LearnedOptimizer and VeLO share."""
