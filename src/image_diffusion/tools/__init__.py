"""Commands that are not rules of the workflow."""
