"""Changes in the code that some test must notice: `python tools/mutants.py [--only WORD] [--list]`.

Each mutant is one replacement in one file, and the tests that are named for that code. The tool
copies the repository to a temporary folder, applies one mutant at a time there, and runs its tests
until the first failure. A mutant that survives is either equivalent (then say why
here) or untested.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SRC = "src/ortholand/"
COPIED = ("src", "lab", "tests", "pyproject.toml", "conftest.py", "tools", "README.md")

SPECTRAL = "tests/landing/test_spectral.py::test_"
ENGINES = SPECTRAL + "engines_step_alike_off_the_manifold"
SMALL = SPECTRAL + "engines_agree_to_rounding_where_distance_and_step_are_small"
ONCE = SPECTRAL + "the_pull_is_not_counted_twice_before_a_move"
NO_LONGER = SPECTRAL + "no_step_is_longer_than_lr"
NOT_BEYOND = SPECTRAL + "no_pull_goes_beyond_the_manifold"
LARGE_VALUE = SPECTRAL + "a_field_with_one_large_singular_value_is_not_averaged"
ANY = "tests/optim/test_any_gradient.py::test_"
NORMAL = ANY + "what_rounding_leaves_of_a_normal_gradient_stays_in_the_ball"
MODULI = ANY + "muon_turns_by_complex_numbers_whose_moduli_overflow"
INFINITE = ANY + "without_a_safe_step_nothing_infinite_is_written"
HUGE = "tests/native/test_tall.py::test_huge_and_tiny_gradients_step_as_the_reference_does"
FREEZES = "tests/optim/test_silent_freezes.py::test_"
AT_THE_EDGE = FREEZES + "the_root_of_what_rounding_leaves_at_the_edge_is_no_step"
ZEROS = FREEZES + "weights_of_zeros_are_out_of_reach_like_any_other"
START = (
    "tests/optim/test_landing_sgd.py"
    "::test_a_start_may_be_outside_the_ball_by_rounding_but_no_farther"
)
GRAM = "tests/landing/test_gram.py::test_"
FLOOR = GRAM + "a_tangent_norm_is_never_below_its_rounding_error"
SHIFT = GRAM + "muon_takes_half_of_a_singular_value_at_four_times_rounding"
PARTS = GRAM + "a_landing_step_is_the_step_of_its_parts"
APART = GRAM + "rows_apart_step_as_rows_together"
AS_ONE = GRAM + "two_hermitian_matrices_travel_as_one"
FIRST = GRAM + "dampening_knows_the_first_gradient_where_a_rank_has_none_yet"
MULTIPLIERS = "tests/optim/test_multipliers.py::test_rows_on_ranks"
LOADING = "tests/optim/test_seams.py::test_a_buffer_counts_as_skew_only_if_it_is_nearly"
REST = "tests/optim/test_half_precision.py::test_the_rest_follows_its_weight"
CREEPS = "tests/optim/test_scales.py::TestWhatStays::test_no_weight_creeps"
GUARDS = "tests/distributed/test_guards.py"
DISAGREEING = "tests/distributed/test_disagreeing.py"


BALL = "tests/optim/test_ball.py tests/landing/test_spectral.py"


class Mutant(NamedTuple):
    """A replacement, where it is made, and the tests that must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


LANDING = SRC + "native/landing.cpp"
GATHERING, DERIVATIVES = SRC + "optim/weights.py", SRC + "geometry/derivatives.py"
GRAM_PY, MOMENTS, MUON = (SRC + f"landing/{name}.py" for name in ("gram", "moments", "muon"))
SHARDED, EXCHANGE = SRC + "optim/engines/sharded.py", SRC + "sharding/exchange.py"
AGREEMENT = SRC + "sharding/agreement.py"
ATTRACTION, COUPLED, AFTER, POINT = (
    SRC + f"landing/{name}.py" for name in ("attraction", "coupled", "after", "point")
)

MUTANTS = [
    # Python: those that earlier tests had not noticed, then the measured step and the Gram form.
    Mutant("no edge", SRC + "safe_step.py", "EDGE = 16 ", "EDGE = 0 ", AT_THE_EDGE),
    Mutant("start limit", SRC + "optim/start.py", "1.0001 * radius", "1.1 * radius", START),
    Mutant("Adam's clamp", MOMENTS, "clamp(max=1e18 *", "clamp(max=1e19 *", HUGE),
    Mutant("Adam's floor", MOMENTS, "roundoff * size).sqrt()", "0 * size).sqrt()", FLOOR),
    Mutant("Muon's shift", MUON, "(4 * roundoff * trace(T)", "(40 * roundoff * trace(T)", SHIFT),
    Mutant("Muon's shift on ranks", MUON, "first.T, 4 * roundoff", "first.T, 40 * roundoff", SHIFT),
    Mutant("skew enough", SRC + "optim/loading.py", "<= 1e-3 * size", "<= 1e-1 * size", LOADING),
    Mutant("state count", GATHERING, "len(state) == n_state and ", "", REST),
    Mutant(
        "first order",
        DERIVATIVES,
        "info > 0)[..., None, None], identity",
        "info >= 0)[..., None, None], identity",
        MULTIPLIERS,
    ),
    Mutant("pull of coupled", COUPLED, "t, away, value=2)", "t, away, value=4)", ONCE),
    Mutant("share of a move", ATTRACTION, "torch.fmin(t, t * part)", "t", ENGINES),
    Mutant("longer share", ATTRACTION, "torch.fmin(t, t * part)", "t * part", NO_LONGER),
    Mutant("longest step", COUPLED, "1 / (2 * lam) if", "1 / lam if", NOT_BEYOND),
    Mutant("share of after", AFTER, ".masked_fill_(reached <= limit, 1.0)", ".fill_(1.0)", ENGINES),
    Mutant("drift of after", AFTER, "(share - square) * t", "0 * t", ENGINES),
    Mutant("mean of after", AFTER, ".clamp(min=1)", ".clamp(min=1).fill_(1)", ENGINES),
    Mutant(
        "trial",
        SRC + "safe_step.py",
        "t = math.sqrt(2 * p) / norm",
        "t = 1e3 / norm",
        HUGE,
    ),
    Mutant("look before", ATTRACTION, "(X, d, looked_at) <= aim", "(X, d, looked_at) <= 9", BALL),
    Mutant("look of after", AFTER, "<= 1 + options.limit:", "<= 9:", BALL),
    Mutant("landed too soon", POINT, "LANDED = 16 ", "LANDED = 1e12 ", PARTS),
    Mutant("noise", SRC + "fields.py", "(8 + math.sqrt(n))", "0 * (8 + math.sqrt(n))", NORMAL),
    Mutant("rounding of coupled", COUPLED, "alpha=1 / (1 - options.eps)", "alpha=0", NORMAL),
    Mutant("moduli", SRC + "geometry/polar.py", "if M.is_complex() else", "if False else", MODULI),
    # Compiled code: what all share.
    Mutant("C++ longest", LANDING, "1 / (2 * o.lam)", "1 / o.lam", NOT_BEYOND),
    Mutant("C++ edge", LANDING, "EDGE = 16;", "EDGE = 0;", AT_THE_EDGE),
    Mutant("C++ root", LANDING, "(reach + slope) / P", "reach / P", ENGINES),
    Mutant("C++ distance 1", LANDING, "distance < FARTHEST)", "distance < 2)", ZEROS),
    Mutant("C++ gentle pull", LANDING, "at_least(inside / squares, 0)", "o.omega", ENGINES),
    Mutant("C++ finite", LANDING, "kept < LARGEST_NORM", "kept < INFINITY", INFINITE),
    Mutant("C++ bias", LANDING, "steps, l) + 1.0;", "steps, l) + 2.0;", ENGINES),
    Mutant(
        "C++ farthest", LANDING, "error, o.farthest - d", "error, 1.5 * o.farthest - d", ENGINES
    ),
    Mutant("C++ maximize", LANDING, "o.maximize ? -1 : 1", "1", ENGINES),
    Mutant("C++ count", LANDING, "finite[l] && eta[l] < o.lr)", "eta[l] > o.lr)", ENGINES),
    Mutant("C++ free bound", LANDING, "pulled) + length *", "pulled) + length / 4 *", LARGE_VALUE),
    Mutant("C++ centring", LANDING, "c = 1 / root(1 + mean)", "c = 1", ENGINES),
    Mutant(
        "C++ follow", SRC + "native/rows.h", "T(1) ? own.X : own.K", "T(1) ? own.X : own.X", CREEPS
    ),
    Mutant("C++ little", LANDING, "LITTLE = 0.125", "LITTLE = 1e6", SMALL),
    Mutant("C++ share", LANDING, "at_least(room, 0) / at_least", "1 / at_least", ENGINES),
    Mutant("C++ longer share", LANDING, "/ P, away), 1)", "/ P, away), 9)", NO_LONGER),
    # Square matrices.
    Mutant("square damping", LANDING, "> 0, 1 - o.dampening, 1)", "> 0, 1, 1)", ENGINES),
    Mutant("square Nesterov", LANDING, "ahead = T(o.nesterov)", "ahead = T(0)", ENGINES),
    # Tall matrices.
    Mutant("tall roundoff", LANDING, "epsilon() / 2) {}", "epsilon() * 1e6) {}", ENGINES),
    Mutant("tall landed", LANDING, "for_all(d <= roundoff)", "for_all(d <= 1)", ENGINES),
    Mutant("tall series", LANDING, "for_all(d * d <= roundoff)", "for_all(d <= 1)", ENGINES),
    Mutant("tall moderate", LANDING, "!square && !is_moderate()", "false", HUGE),
    Mutant("tall Nesterov", LANDING, "g = sign + o.momentum * h", "g = sign + h", ENGINES),
    Mutant("tall damping", LANDING, "h[l] = sign * (1 - o.dampening)", "h[l] = sign", ENGINES),
    Mutant("tall mean", LANDING, "g = sign * (1 - o.beta1)", "g = sign * o.beta1", ENGINES),
    Mutant("tall rounding of coupled", LANDING, "- astray / 2 / (1 - o.eps)", "", NORMAL),
    Mutant("tall rounding", LANDING, "reached + astray <= o.aim", "reached <= o.aim", NORMAL),
    # Ranks.
    Mutant("identity's share", SRC + "geometry/matrices.py", ".sub_(share)", ".sub_(1)", APART),
    Mutant("half of a sum", EXCHANGE, "D.triu() + T.tril(-1)", "D.triu() + T.tril()", AS_ONE),
    Mutant("diagonal lost", EXCHANGE, "packed[..., -1, :])", "packed[..., 0, :])", AS_ONE),
    Mutant("counts packed", SHARDED, "state[LIMITED] << 32", "state[LIMITED] << 31", GUARDS),
    Mutant("skips agreed", SHARDED, "terms) == 0", "terms) >= 0", GUARDS),
    Mutant(
        "first gradient",
        MOMENTS,
        "1 - sums.others[-1].real.clamp(max=1)",
        "sums.others[-1].real.clamp(max=1)",
        FIRST,
    ),
    Mutant("mark of terms", AGREEMENT, "factor = 1 - size if", "factor = 1 if", DISAGREEING),
]

EQUIVALENT: dict[str, str] = {}  # by name: why no test can notice


def main() -> int:
    """Run the mutants; the number that survived without being equivalent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only mutants whose name contains this")
    parser.add_argument("--list", action="store_true", help="check that all apply, run nothing")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    for mutant in chosen:
        if (ROOT / mutant.file).read_text().count(mutant.old) < 1:
            sys.exit(f"{mutant.name}: {mutant.old!r} is not in {mutant.file}.")
        for test in mutant.tests.split():
            file, _, name = test.partition("::")
            if f"def {name.rpartition('::')[2]}" not in (ROOT / file).read_text():
                sys.exit(f"{mutant.name}: there is no {test}.")
    if arguments.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        survived = [m.name for m in chosen if not is_killed(m, copied_to(Path(folder)))]
    unexplained = [name for name in survived if name not in EQUIVALENT]
    killed = len(chosen) - len(survived)
    print(
        f"{killed} of {len(chosen)} killed; equivalent {len(survived) - len(unexplained)}; "
        f"survived: {', '.join(unexplained) or 'none'}"
    )
    return len(unexplained)


def copied_to(folder: Path) -> Path:
    """A fresh copy of what the tests need."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


def run_in(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the mutated copy."""
    paths = {"PYTHONPATH": f"{copy}/src:{copy}/lab/src", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=copy, env={**os.environ, **paths}, capture_output=True, text=True
    )


def is_killed(mutant: Mutant, copy: Path) -> bool:
    """Whether the mutant's tests fail."""
    path, start = copy / mutant.file, time.perf_counter()
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    if path.suffix != ".py":  # where there is no compiled code, tests pass by torch's operations
        code = "from torch import float32, float64; from ortholand.native import why_no_code as why"
        why = run_in(copy, "-c", f"{code}; print(why(float32) or why(float64) or '')")
        if why.stdout.strip() or why.returncode:
            print(f"BROKEN    {mutant.name}: {why.stdout}{why.stderr}", flush=True)
            return False
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow_distributed"]
    done = run_in(copy, "-m", "pytest", *options, *mutant.tests.split())
    by = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    killed = by is not None
    if not killed and done.returncode != 0:
        print(done.stdout[-2000:], done.stderr[-2000:])
    verdict = "killed" if killed else "SURVIVED" if done.returncode == 0 else "BROKEN"
    seconds = time.perf_counter() - start
    print(f"{verdict:9} {mutant.name} ({seconds:.0f} s) {by[1] if by else ''}", flush=True)
    return killed


if __name__ == "__main__":
    sys.exit(main())
