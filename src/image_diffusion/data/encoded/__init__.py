"""Data sets derived from crops: latents, captions, and pairs."""
