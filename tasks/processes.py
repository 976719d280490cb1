"""Who a process is, so that another one which was given its number later is not taken for it (Linux)."""

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STATE, START_TICKS = 0, 19
"""Of the fields of /proc/<pid>/stat after the name: field 3 and field 22 of proc(5)."""
ENDED = (b"Z", b"X", b"x")


def identity(pid: int) -> str | None:
    """`boot id/clock ticks from the boot to the process's start`; None where no such process runs, zombies included.

    Unlike a start time in seconds since 1970, which is what psutil.Process.create_time() makes of the same ticks, it
    does not move when somebody sets the clock.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()  # a name may hold blanks and parentheses
    if fields[STATE] in ENDED:
        return None
    return f"{boot_id()}/{int(fields[START_TICKS])}"


_identity = identity


def lives(pid: int, identity: str) -> bool:
    """Does the process of that number and identity still run?"""
    return _identity(pid) == identity


def boot_id() -> str:
    """Of the running kernel; another one after each start of the machine."""
    return BOOT_ID.read_text().strip()
