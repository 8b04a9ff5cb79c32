"""The layer of indexer, selection and attention: GatedSparseAttention and its KeyCache."""
