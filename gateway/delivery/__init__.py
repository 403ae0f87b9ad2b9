"""Attempts on replicas: relay of the response, retries, timeouts, spillover.

Read first: `retry_loop`.
"""
