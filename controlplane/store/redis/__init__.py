"""State in Redis: live reports and usage of limits. All of it can be lost."""
