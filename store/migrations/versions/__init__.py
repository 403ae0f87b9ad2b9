"""The steps, each in one module, in the order that ``down_revision`` gives."""
