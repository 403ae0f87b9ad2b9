"""Pure decisions: synchronous code over immutable values, no clock, no I/O."""
