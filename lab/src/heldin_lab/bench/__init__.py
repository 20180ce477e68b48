"""What observing costs, beside other ways to get the same: `heldin-lab bench` or `make bench`."""

from .counts import count_steps
from .report import write_report
from .run import Measurement, growth, measure, measure_apart, peak_memory, steady_heap
from .workloads import WORKLOADS, Workload

__all__ = [
    "WORKLOADS",
    "Measurement",
    "Workload",
    "count_steps",
    "growth",
    "measure",
    "measure_apart",
    "peak_memory",
    "steady_heap",
    "write_report",
]
