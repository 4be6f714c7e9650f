"""Benchmarks: ``ortholand bench`` runs them. Each is a study, and one line here."""

from ortholand.lab.benchmarks.steps.study import STEPS
from ortholand.lab.study.spec import AnyStudy

BENCHMARKS: dict[str, AnyStudy] = {study.name: study for study in (STEPS,)}

__all__ = ["BENCHMARKS"]
