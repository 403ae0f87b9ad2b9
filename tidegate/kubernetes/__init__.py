"""Tidegate on Kubernetes: plain manifests from a deployment file."""
