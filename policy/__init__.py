"""Pure decisions: synchronous code over immutable values, without clock or I/O.

Read first: `types`.
"""
