"""Bytes of files, shared by every API and dispatcher process."""
