"""Plan, requirements, options and lock as data."""
