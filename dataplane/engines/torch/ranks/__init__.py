"""The ranks of a slot of several GPUs: rank 0 decides, the others follow its commands in step."""
