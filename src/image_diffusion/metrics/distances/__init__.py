"""Distances between two sets of features, with intervals."""
