"""LoRA adapters: fetched, admitted, kept by digest, and named."""
