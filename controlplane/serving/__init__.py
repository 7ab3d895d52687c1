"""Sending a request to the fleet: what the interactive gateway and the dispatcher share."""
