"""The control plane: decides where models run and where requests go."""
