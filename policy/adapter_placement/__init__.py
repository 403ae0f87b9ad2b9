"""Assignment of LoRA adapters to replicas.

Read first: `plan`.
"""
