"""Shards of crops: which to write, how, and what is written beside them."""
