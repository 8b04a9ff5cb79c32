"""The norm of the rule's outputs, gated."""
