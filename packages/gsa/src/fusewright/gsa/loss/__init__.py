"""The loss that an indexer learns by: indexer_kl_loss."""
