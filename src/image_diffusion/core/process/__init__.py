"""Processes: commands, signals, errors, and progress."""
