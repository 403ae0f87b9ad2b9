"""Runs the steps inside the transaction of whoever opens the database: they are there whole or not at all."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
