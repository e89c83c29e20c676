"""Metrics of single images, pairs, and conditions."""
