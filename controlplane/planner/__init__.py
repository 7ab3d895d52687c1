"""The hourly and minutely loops: each gathers, decides, applies, and is safe to run twice."""
