"""LoRA adapters: fetched, validated, stored by digest, and named. Read first: `import_adapter`."""

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# What an adapter consists of; whatever else lies beside them is not kept.
FILES = (CONFIG, WEIGHTS)
