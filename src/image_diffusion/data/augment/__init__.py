"""Augmentation of pixels, of which the network is told."""
