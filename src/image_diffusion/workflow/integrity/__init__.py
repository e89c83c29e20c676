"""Damage, locks, and Snakemake's records."""
