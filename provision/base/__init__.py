"""Foundations for every folder: errors, paths, resources, signals, versions, downloads, the terminal."""
