"""What two families use unchanged."""
