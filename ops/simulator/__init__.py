"""What happens with this traffic, these GPUs and these policies: the live service's own policies in simulated time."""
