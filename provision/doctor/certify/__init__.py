"""Certification of hosts before work: what each computes, and how they reach each other, measured, judged and reported."""
