"""Memory that was freed stays with the process: an update asks for the same sizes again.

glibc gives large blocks back to the system at once, and each comes back page by page, on
first touch. Where page faults are dear (virtual machines) that is a tenth of an update.
"""

from __future__ import annotations

import ctypes
import platform

# M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD of malloc.h. Blocks up to the last come from the
# heap, as much free memory as the first says stays there, and it grows by the second at a time.
# glibc before 2.35 refuses a last one above 32 MiB.
_OPTIONS = {-1: (2**30,), -2: (2**28,), -3: (2**30, 2**25)}


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep what is freed; says whether it does. Changes no number.

    Nothing happens under another C library, or where MALLOC_... settings cannot be made.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    done = [any(set_option(option, size) for size in sizes) for option, sizes in _OPTIONS.items()]
    return all(done)
