"""What both feed-forward layers use unchanged."""
