"""``ortholand bench``: time and memory of a step, ours beside those of every installed peer."""

from ortholand.bench.experiment import BENCH, CASES, bench_json, markdown_table

__all__ = ["BENCH", "CASES", "bench_json", "markdown_table"]
