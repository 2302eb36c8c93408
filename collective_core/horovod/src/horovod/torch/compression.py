"""Compression, and the classes to make one's own of."""

from collective_core.torch.compression import Compression as Compression
from collective_core.torch.compression import Compressor as Compressor
from collective_core.torch.compression import FP16Compressor as FP16Compressor
from collective_core.torch.compression import NoneCompressor as NoneCompressor
