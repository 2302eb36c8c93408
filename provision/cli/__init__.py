"""The command line: what a user types is parsed here, and what comes of it printed."""
