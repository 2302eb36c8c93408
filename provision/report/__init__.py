"""What a run came to, for people and as JSON."""
