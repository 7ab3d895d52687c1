"""The data plane: node agents and the engines that make tokens."""
