"""A mirror of a project in a bucket, from which another machine can continue if this one is lost."""
