"""The agent process: a node's HTTP server, its heartbeats, and the workers that it runs. It never imports torch."""
