"""Augmentation of pixels, whose parameters are a condition of the network."""
