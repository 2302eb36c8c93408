"""GPUs that sandbox hosts only seem to have: what a host with them shows to programs that look, from the PCI bus to nvidia-smi.

Profiles and faults are data. No program can run on such a GPU: CUDA finds none.
"""
