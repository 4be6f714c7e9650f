"""Data sets of the paper's experiments, from files that are found, downloaded or stood in for.

Nothing here unpickles, and a file is used only if it is the published one to the last bit.
"""

from ortholand.lab.datasets.base import Dataset, DatasetError, Source
from ortholand.lab.datasets.search import (
    Name,
    cache_folder,
    data_notice,
    dataset_title,
    find_dataset,
)

__all__ = [
    "Dataset",
    "DatasetError",
    "Name",
    "Source",
    "cache_folder",
    "data_notice",
    "dataset_title",
    "find_dataset",
]
