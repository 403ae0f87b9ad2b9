"""What a request's body may hold: known fields, bounds of what multiplies work, and media by URL.

Read first: `forwarded_fields`.
"""
