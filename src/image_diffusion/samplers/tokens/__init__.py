"""Samplers of token transformers."""
