"""The facts of hosts: one read-only round trip to each, a saved file, or the manifests of earlier runs."""
