"""The training job that verifies a cluster: its data, its run, and whether its outcome counts."""
