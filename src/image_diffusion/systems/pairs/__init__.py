"""Pairs of embeddings on which a prior trains."""
