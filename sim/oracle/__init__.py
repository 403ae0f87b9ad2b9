"""What scaling would cost if the future were known: a bound that nothing beats, and a plan to run."""
