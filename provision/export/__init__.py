"""A cluster or an image as the files with which another engine trains there: Slurm, Kubernetes or Ray."""
