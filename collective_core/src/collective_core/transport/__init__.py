"""Transports beside the engine's own shared memory and TCP: MPI for host memory, NCCL for CUDA tensors.

They move the data of an operation on which the engine has agreed, behind the two functions of csrc/transport/external/external_transport.h.
"""
