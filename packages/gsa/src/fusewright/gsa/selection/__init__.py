"""The keys that each query selects by the scores of its indexer: indexer_topk."""
