"""Known errors: their signatures, and what of them stands in a log."""
