"""Data quality: duplicates, split leaks, datasheets."""
