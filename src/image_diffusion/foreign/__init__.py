"""Weights that other programs trained."""
