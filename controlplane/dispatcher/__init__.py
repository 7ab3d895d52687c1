"""The NIW queue manager: validates batches, releases their requests into spare capacity, writes results and files."""

from controlplane.dispatcher.process import serve

__all__ = ["serve"]
