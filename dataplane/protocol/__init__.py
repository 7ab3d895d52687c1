"""Types that cross a process or a machine: messages, errors, model sources, TLS. It imports nothing of the project."""
