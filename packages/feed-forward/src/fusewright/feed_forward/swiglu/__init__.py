"""The gated feed-forward layer around the gating."""
