"""Estimates of a training's time and memory."""
