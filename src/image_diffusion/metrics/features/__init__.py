"""Feature extractors, and stored features of real images."""
