"""Records of what a job did and when: the flight recorder, the timeline and its trace, the clocks of the ranks."""
