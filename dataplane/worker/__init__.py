"""The worker process: one engine on one GPU group, and the frames between it and the agent."""
