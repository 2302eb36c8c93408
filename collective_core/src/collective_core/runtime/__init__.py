"""A process as a rank: its settings, its launcher, the ranks that it meets, the job and the process sets that it belongs to."""
