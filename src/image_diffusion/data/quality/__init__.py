"""Data quality: duplicates, split leaks, data sheets."""
