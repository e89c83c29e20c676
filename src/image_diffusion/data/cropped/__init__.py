"""Shards of crops, and the files beside them."""
