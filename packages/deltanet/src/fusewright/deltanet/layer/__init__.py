"""GatedDeltaNet: projections, short convolutions, the rule and the gated norm."""
