"""The container engine of this machine: its client, keys for containers, and the settings of this machine that they need."""
