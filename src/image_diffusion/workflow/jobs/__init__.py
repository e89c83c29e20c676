"""Jobs: retries, queues, and devices."""
