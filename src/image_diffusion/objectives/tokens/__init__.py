"""Objectives of token transformers."""
