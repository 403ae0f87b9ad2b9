"""What must last: the state directory, secrets and prepared models."""
