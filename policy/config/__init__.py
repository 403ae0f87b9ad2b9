"""The sections of the deployment file as frozen structures.

Read first: `deployment`.
"""
