"""Forecasting models, each of one series at a time."""
