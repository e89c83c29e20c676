"""One image file -> its crops."""
