"""Units of memory and speed, and numbers as texts with their units."""

MIB, GIB = 2**20, 2**30

MIB_PER_GIB = 1024.0

MIN_GIB = 0.1
"""Less memory is shown in MiB."""


def format_memory(mib: float, digits: int = 1) -> str:
    """Format a memory: ``1.5 GiB``, and below 0.1 GiB ``12.3 MiB``."""
    if mib >= MIN_GIB * MIB_PER_GIB:
        return f"{mib / MIB_PER_GIB:,.{digits}f} GiB"
    return f"{mib:.3g} MiB"


def format_tflops(tflops: float) -> str:
    """Format a rate that is given in TFLOP/s: ``790 TFLOP/s``, ``31.2 GFLOP/s``."""
    if tflops >= 100:
        return f"{tflops:,.0f} TFLOP/s"
    return f"{tflops:.3g} TFLOP/s" if tflops >= 0.1 else f"{tflops * 1000:.3g} GFLOP/s"


def format_about(seconds: float) -> str:
    """Return a rough duration: ``25 s``, ``3 min``, ``2 h 10 min``."""
    if seconds < 57.5:  # A longer time would be rounded to 60 s.
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = max(1, round(seconds / 60))
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def format_amount(value: float) -> str:
    """Return a number with three significant digits, never in scientific notation."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.001 or not value else f"{value:.6f}"


def format_kwh(kwh: float) -> str:
    """Return an energy with its unit: ``1.25 kWh``, or below 0.01 kWh ``3.50 Wh``."""
    return f"{format_amount(kwh)} kWh" if kwh >= 0.01 or not kwh else f"{format_amount(1000 * kwh)} Wh"
