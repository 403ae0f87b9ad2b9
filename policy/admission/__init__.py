"""Which request is dispatched, waits or is rejected: queues, fairness, deadlines, spend caps.

Read first: `dispatcher`.
"""
