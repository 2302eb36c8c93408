"""What brings hosts to their plan and takes it off again."""
