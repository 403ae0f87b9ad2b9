"""Generated arrivals, lengths, conversations, agents and adapter popularity. Read first: `generate`."""
