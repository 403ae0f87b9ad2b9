"""Queues of waiting requests: admission, coalescing and rejections.

Read first: `admission`.
"""
