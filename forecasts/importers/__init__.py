"""Recorded demand from files: a plain CSV, and public traces in their published formats. See `formats.FORMATS`."""

from forecasts.importers.lines import DemandFileError
from forecasts.importers.rates import read_azure_week, read_demand_csv, read_sageserve_week

__all__ = ["DemandFileError", "read_azure_week", "read_demand_csv", "read_sageserve_week"]
