"""A fleet as one YAML file: read and checked, compared with what is there, applied through the admin API, exported."""
