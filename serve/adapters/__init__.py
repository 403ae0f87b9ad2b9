"""LoRA adapters in the controller: import jobs, names, catalog, placement. Read first: `adapter_registry`."""
