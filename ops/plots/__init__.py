"""Pictures for people: forecasts and plans over time, as PNG, SVG or PDF."""
