"""Generated arrivals, lengths, conversations and adapter popularity. Read first: `generate`."""
