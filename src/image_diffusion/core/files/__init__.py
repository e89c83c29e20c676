"""Files: atomic writes, checksums, arrays, and weights."""
