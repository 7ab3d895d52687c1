"""What every process of a node needs: logs, secrets masked in them, tracing, private folders."""
