"""Weights trained by other programs."""
