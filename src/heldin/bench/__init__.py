"""What observing costs, beside other ways to get the same: `heldin bench` or `make bench`."""

from ._report import write_report
from ._run import Measurement, growth, measure, measure_apart, peak_memory, steady_heap
from ._workloads import WORKLOADS, Workload

__all__ = [
    "WORKLOADS",
    "Measurement",
    "Workload",
    "growth",
    "measure",
    "measure_apart",
    "peak_memory",
    "steady_heap",
    "write_report",
]
