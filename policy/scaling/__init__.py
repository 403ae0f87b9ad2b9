"""How many replicas a model has, and in which mode: guardrails, budgets, rollout.

Read first: `decide`.
"""
