"""Drives the dispatcher of each model on the event loop: queues, coalescing and rejections.

Read first: `admission`.
"""
