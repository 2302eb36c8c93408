"""Compression, and the classes to make one's own of."""

from collective_core.tensorflow.compression import Compression as Compression
from collective_core.tensorflow.compression import Compressor as Compressor
from collective_core.tensorflow.compression import FP16Compressor as FP16Compressor
from collective_core.tensorflow.compression import NoneCompressor as NoneCompressor
