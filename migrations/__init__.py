"""Alembic migrations of the Postgres schema."""
