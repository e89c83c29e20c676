"""Conversions between our parameter names and those of published weights."""
