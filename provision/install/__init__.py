"""Installation of the plan on hosts, and its removal."""
