"""Gaussian mixtures: the log-likelihood and its mean; moments, distribution function, quantiles and
samples.
"""
