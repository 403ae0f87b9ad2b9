"""The offline shell: where the production policies are run on a trace instead of on a cluster."""
