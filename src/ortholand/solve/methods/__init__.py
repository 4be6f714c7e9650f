"""One file for each method of ``minimize`` and ``minimize_finite_sum``."""
