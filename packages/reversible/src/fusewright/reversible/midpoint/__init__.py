"""The midpoint rule through a stack of layers: MidpointStack and its Tape."""
