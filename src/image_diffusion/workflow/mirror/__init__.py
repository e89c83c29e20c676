"""A mirror of a project in a bucket: a machine may be lost, and another one goes on."""
