"""The follower process: another host of an agent's slot. May import the agent's link to a child process."""
