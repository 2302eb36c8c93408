"""What hosts are and hold: one read-only look at each."""
