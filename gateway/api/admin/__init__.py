"""The routes of the admin port, and who may use them.

Read first: `authorization`.
"""
