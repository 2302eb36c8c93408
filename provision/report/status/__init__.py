"""What goes on on the hosts now: state, drift, load, GPUs and jobs; for a terminal, as JSON and as a page."""
