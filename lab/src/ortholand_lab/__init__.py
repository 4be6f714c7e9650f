"""The laboratory: the paper's experiments, benchmarks, and all they need besides the library.

The library does not import it. A study (:mod:`.study.spec`) says what is run, what is claimed about
the records and how they are drawn; :mod:`.experiments` are the paper's, :mod:`.benchmarks` compare
with peers, :mod:`.errata` measures corrected statements. ``ortholand`` (:mod:`.cli`) runs them.
"""
