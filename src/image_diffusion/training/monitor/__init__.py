"""Reports of a training: losses, speed, and validation."""
