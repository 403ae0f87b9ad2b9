"""Deployment files from what other servers are started with: `vllm serve`, LiteLLM, production-stack."""
