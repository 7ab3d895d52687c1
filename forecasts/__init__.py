"""Forecasts of demand: pure functions of series, without clock or database."""
