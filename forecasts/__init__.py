"""Forecasts of demand: pure functions of series, never of a clock or a database."""
