"""Writes edges.txt: the edges of calendars in many zones, by Python's zoneinfo.

    python3 src/base/calendar/tests/edges.py > src/base/calendar/tests/edges.txt

A line has a zone, a calendar, the number of its edges from 1971 to 2169, and a hash of them in seconds. Before the lines
of a zone stands a hash of its offsets at each noon of UTC from 1970 on, which shows whether a machine has the same data.
"""

from datetime import date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

ZONES = [
    "UTC", "Europe/Berlin", "Europe/London", "Europe/Dublin", "Europe/Moscow", "Africa/Cairo", "Africa/Casablanca",
    "Africa/Monrovia", "Asia/Beirut", "Asia/Gaza", "Asia/Kathmandu", "Asia/Kolkata", "America/Havana", "America/New_York",
    "America/Sao_Paulo", "America/Scoresbysund", "America/St_Johns", "Antarctica/Troll", "Australia/Lord_Howe",
    "Pacific/Apia", "Pacific/Chatham", "Pacific/Kwajalein",
]
FIRST, LAST = date(1970, 1, 1), date(2170, 1, 1)
UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def fnv(numbers):
    hashed = 0xCBF29CE484222325
    for number in numbers:
        for byte in number.to_bytes(8, "little", signed=True):
            hashed = (hashed ^ byte) * 0x100000001B3 % 2**64
    return f"{hashed:016x}"


def local(zone, seconds):
    """The local time at an instant, without its zone."""
    return (EPOCH + timedelta(seconds=seconds)).astimezone(zone).replace(tzinfo=None)


def first_instant(zone, day):
    """The first instant at which the local date is this day or a later one."""
    midnight = datetime(day.year, day.month, day.day)
    seconds = int((midnight.replace(tzinfo=zone, fold=0).astimezone(UTC) - EPOCH).total_seconds())
    if local(zone, seconds) == midnight:
        return seconds
    # The midnight does not exist: search for the jump over it.
    low, high = seconds - 2 * 86400, seconds + 2 * 86400
    while high - low > 1:
        middle = (low + high) // 2
        if local(zone, middle) >= midnight:
            high = middle
        else:
            low = middle
    return high


def length(day):
    return ((day.replace(day=28) + timedelta(days=4)).replace(day=1) - timedelta(days=1)).day


CALENDARS = {
    "day": lambda day: True,
    "week": lambda day: day.weekday() == 0,
    "week from sunday": lambda day: day.weekday() == 6,
    "month": lambda day: day.day == 1,
    "month from day 15": lambda day: day.day == 15,
    "month from day 29": lambda day: day.day == min(29, length(day)),
    "month from day 30": lambda day: day.day == min(30, length(day)),
    "month from day 31": lambda day: day.day == length(day),
    "quarter": lambda day: day.day == 1 and day.month % 3 == 1,
    "year": lambda day: day.day == 1 and day.month == 1,
}

DAYS = [FIRST + timedelta(days=number) for number in range((LAST - FIRST).days)]

for name in ZONES:
    zone = ZoneInfo(name)
    noons = [EPOCH + timedelta(days=number, hours=12) for number in range(len(DAYS))]
    print(f"{name}: {fnv(int(noon.astimezone(zone).utcoffset().total_seconds()) for noon in noons)}")
    instants = [first_instant(zone, day) for day in DAYS]
    for calendar, is_edge in CALENDARS.items():
        edges = []
        for day, instant in zip(DAYS, instants):
            # A day that the zone left out has no instant. The first edge may be before 1970.
            if is_edge(day) and day.year > 1970 and (not edges or edges[-1] != instant):
                edges.append(instant)
        print(f"  {calendar}: {len(edges)} {fnv(edges)}")
