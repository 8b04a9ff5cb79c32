"""What the memory is asked and told, from a sequence of tokens: projections, convolution, gates,
and the tokens that are left out.
"""
