"""LoRA adapters: fetched, admitted, kept by digest, and named."""

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# What an adapter consists of; whatever else lies beside them is not kept.
FILES = (CONFIG, WEIGHTS)
