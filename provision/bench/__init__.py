"""`provision bench`: what the engine reaches on these hosts, pair by pair and with more and more ranks, beside what the links can do."""
