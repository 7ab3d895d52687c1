"""The client of the admin API, and how its answers are printed."""
