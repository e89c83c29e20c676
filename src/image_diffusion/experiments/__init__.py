"""Experiment files: their sections, and comparisons of several."""
