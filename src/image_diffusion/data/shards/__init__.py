"""Shards: writing, indexing, ordering, and loading."""
