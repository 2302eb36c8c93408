"""Blocks of numbers as 8-bit or 4-bit integers with a scale each: what travels in place of float32 values.

A block is BLOCK values; its scale is the largest magnitude in it divided by the largest integer (127 or 7), and values are rounded to the
nearest multiple of it. Two integers of 4 bits share a byte. Packed rows hold the integers of all blocks, then their float32 scales, so
8 bits take 1.03 bytes a value and 4 bits 0.53.

Unpacking multiplies one integer by one float32, which every processor rounds alike: the same bytes are the same bits everywhere.
"""

from __future__ import annotations

import torch

#: Values that share a scale: few enough that an outlier spoils little, many enough that scales add 3 % to 8 bits and 6 % to 4.
BLOCK = 128
SCALE_BYTES = 4
#: What values may be packed into.
WIDTHS = (8, 4)


def packed_bytes(values: int, bits: int) -> int:
    """Bytes of a row of so many values, a multiple of BLOCK."""
    return values * bits // 8 + values // BLOCK * SCALE_BYTES


def pack(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of float32, (number, values) with a multiple of BLOCK values, as uint8, (number, packed_bytes).

    Not finite values make their whole block so: whoever looks for infinities finds them.
    """
    most = (1 << (bits - 1)) - 1
    blocks = rows.reshape(len(rows), -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True) / most
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    levels = (blocks / divisors).round_().clamp_(-most, most).nan_to_num_().to(torch.int8).reshape(len(rows), -1)
    if bits == 4:
        shifted = (levels + 8).view(torch.uint8)
        codes = shifted[:, 0::2] * 16 + shifted[:, 1::2]
    else:
        codes = levels.view(torch.uint8)
    return torch.cat([codes, scales.reshape(len(rows), -1).contiguous().view(torch.uint8)], dim=1)


def unpack(packed: torch.Tensor, values: int, bits: int) -> torch.Tensor:
    """The reverse of :func:`pack`: rows of so many float32 values."""
    codes, scales = packed[:, : values * bits // 8].contiguous(), packed[:, values * bits // 8 :].contiguous().view(torch.float32)
    if bits == 4:
        pairs = torch.stack([torch.div(codes, 16, rounding_mode="floor"), codes % 16], dim=2).reshape(len(packed), -1)
        levels = pairs.to(torch.float32) - 8
    else:
        levels = codes.view(torch.int8).to(torch.float32)
    return (levels.view(len(packed), -1, BLOCK) * scales.unsqueeze(2)).view(len(packed), -1)
