"""Copy streams between host memory and a device, and the host memory pinned for them."""
