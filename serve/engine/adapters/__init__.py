"""LoRA adapters of one engine: their files, slots and loads. Read first: `loader`."""
