"""Indexes of large tables that processes read meanwhile."""

from typing import Any

from alembic import op


def build_index(name: str, table: str, columns: list[str], **options: Any) -> None:
    """Build an index, unless it is there. This is a transaction of its own, which also commits what the migration did
    before: the index stays where the rest of the migration gives way to other connections and begins again, and who
    waits to write goes on before it.
    """
    with op.get_context().autocommit_block():
        driver: Any = op.get_bind().connection.driver_connection
        with driver.transaction():
            op.create_index(name, table, columns, if_not_exists=True, **options)


def replace_index(name: str, table: str, columns: list[str]) -> None:
    """Give an index these columns. Reads of the table go on while the new one is built; to drop the old one, which
    locks them out, is the work of a moment.
    """
    build_index(f"{name}_next", table, columns)
    op.drop_index(name, table)
    op.execute(f"ALTER INDEX {name}_next RENAME TO {name}")
