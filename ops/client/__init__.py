"""The client of the admin API, where it finds its key, and how answers are printed."""
