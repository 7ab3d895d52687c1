"""What is kept in Redis: live reports and the use of limits. All of it can be lost."""
