"""Objectives of codecs."""
