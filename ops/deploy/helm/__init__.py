"""The Helm chart, and example values."""
