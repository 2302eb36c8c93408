"""`provision bench`: allreduce between every pair of hosts and on more and more ranks, next to what the links can do; training steps."""
