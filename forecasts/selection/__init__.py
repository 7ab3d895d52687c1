"""Which model forecasts which series: backtests on the past, selection, calibration."""
