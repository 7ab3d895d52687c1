"""Benchmarks of planning: placement, pools, forecasts, scaling strategies."""
