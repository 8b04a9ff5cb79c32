"""What the families share: many tensors in one launch, the contract of an optimizer, checks."""
