"""Sets of pairs: embeddings that a prior trains on, and conditions or features of images."""
