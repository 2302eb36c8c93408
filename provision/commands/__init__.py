"""The use cases behind the commands, one per module."""
