"""Configuration: validated sections, inheritance, and YAML."""
