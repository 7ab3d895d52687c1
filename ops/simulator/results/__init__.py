"""What a simulation says at its end: results, reports, comparisons, drawings."""
