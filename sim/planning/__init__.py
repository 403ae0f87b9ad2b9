"""Planning of capacity: the fewest devices that meet the objective, judged in the twin."""
