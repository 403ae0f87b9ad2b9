"""What controllers that elect a leader share: the lease, and the state of the one that leads."""
