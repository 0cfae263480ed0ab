"""The checksum of TFRecord files: CRC-32C, masked as TensorFlow does it."""

from __future__ import annotations


def _table() -> tuple[int, ...]:
    entries = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        entries.append(crc)
    return tuple(entries)


_TABLE = _table()


def masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
