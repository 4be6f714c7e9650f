"""Data sets of the paper's experiments, from files found or downloaded, or from a stand-in.

Nothing here unpickles, and a file is used only if it is the published one, bit for bit.
"""

from ortholand_lab.datasets.base import Dataset, DatasetError, Source
from ortholand_lab.datasets.search import (
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
