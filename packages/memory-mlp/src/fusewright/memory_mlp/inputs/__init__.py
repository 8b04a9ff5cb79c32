"""The inputs of a memory, from a sequence of tokens: projections, convolution, gates,
and the tokens that are left out.
"""
