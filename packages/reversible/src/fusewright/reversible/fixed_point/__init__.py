"""States as whole numbers, whose sums are undone to the bit: FixedPoint."""
