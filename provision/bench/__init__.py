"""`provision bench`: what the engine reaches on these hosts, pair by pair and with more and more ranks, next to what the links can do."""
