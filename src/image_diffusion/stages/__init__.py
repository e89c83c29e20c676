"""Commands that are rules of the workflow: each parses its arguments, calls the package, and prints."""
