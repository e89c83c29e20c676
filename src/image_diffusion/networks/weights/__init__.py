"""Conversions between this package's parameter names and those of published weights."""
