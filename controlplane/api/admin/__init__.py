"""The admin REST API: fleet, models, demand, plans, keys, audit."""
