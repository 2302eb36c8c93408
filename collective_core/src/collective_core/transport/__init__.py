"""A transport beside the engine's own shared memory and TCP: MPI for host memory.

It moves the data of an operation on which the engine has agreed, behind the two functions of csrc/transport/external/external_transport.h.
"""
