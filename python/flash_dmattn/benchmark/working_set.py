"""How much memory a benchmark goes through, so that nothing is left in the processor's caches when it is read again."""

from __future__ import annotations

import re
from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_MEMINFO = Path("/proc/meminfo")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LEAST = 256 << 20  # where the caches are small, or their size is not known


def last_level_cache(caches: Path = _CACHES) -> int:
    """Bytes of the highest level of the processor's caches; 0 where the system does not tell."""
    found = [(0, 0)]
    for index in caches.glob("index*"):
        try:
            level = int((index / "level").read_text())
            number, unit = re.fullmatch(
                r"(\d+)([KMG]?)", (index / "size").read_text().strip()
            ).groups()
        except (OSError, ValueError, AttributeError):
            continue
        found.append((level, int(number) * _UNITS[unit]))
    return max(found)[1]


def available_memory(meminfo: Path = _MEMINFO) -> int | None:
    """Bytes that programs can have without swapping; None where the system does not tell."""
    try:
        text = meminfo.read_text()
    except OSError:
        return None
    kibibytes = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(kibibytes[1]) << 10 if kibibytes else None


def beyond_cache(cache: int, available: int | None) -> int:
    """Four times the cache, 256 MiB at least, but no more than a quarter of the memory that is available."""
    wanted = max(4 * cache, _LEAST)
    return wanted if available is None else min(wanted, available // 4)
