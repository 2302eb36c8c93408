"""What every folder uses: errors, paths, resources, signals, versions, downloads, the terminal."""
