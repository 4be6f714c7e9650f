"""Changes in the code that some test must notice: `python tools/mutants.py [--only WORD] [--list]`.

Each mutant is one replacement in one file, and the tests that are named for that code. The tool
copies the repository to a temporary folder, applies one mutant at a time there, and runs its tests
until the first failure. A mutant that survives is either equivalent (then say why
here) or untested.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SRC = "src/ortholand/"
COPIED = ("src", "tests", "pyproject.toml", "conftest.py", "tools", "README.md")

SQUARE = "tests/optim/test_fused.py tests/native/test_native.py tests/landing/test_spectral.py"
TALL = "tests/native/test_tall.py tests/landing/test_spectral.py tests/optim/test_multipliers.py"
SAFE = "tests/optim/test_ball.py tests/landing/test_spectral.py tests/test_safe_step.py"
GRAM = "tests/landing/test_gram.py tests/landing/test_after.py tests/optim/test_multipliers.py"
ANY = "tests/optim/test_any_gradient.py tests/native/test_tall.py"
RANKS = "tests/distributed/test_collectives.py tests/distributed/test_equality.py"
START = (
    "tests/optim/test_landing_sgd.py tests/landing/test_spectral.py tests/optim/test_conformance.py"
)
MUON_TESTS = "tests/landing/test_gram.py tests/landing/test_muon.py"
LOADING = "tests/optim/test_loading.py tests/optim/test_seams.py"
RENEWED = "tests/optim/test_renewed.py tests/optim/test_half_precision.py"
FREEZES = "tests/optim/test_silent_freezes.py"
SCALES = "tests/native/test_scales.py tests/optim/test_scales.py"
GUARDS = "tests/distributed/test_guards.py"
DISAGREEING = "tests/distributed/test_disagreeing.py"


class Mutant(NamedTuple):
    """A replacement, where it is made, and the tests that must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


LANDING, TALL_CPP = SRC + "native/landing.cpp", SRC + "native/tall.cpp"
STEPS, COMPILED = SRC + "native/steps.h", SRC + "optim/engines/compiled.py"
GRAM_PY, MOMENTS, MUON = (SRC + f"landing/{name}.py" for name in ("gram", "moments", "muon"))
SHARDING, AGREEMENT = SRC + "sharding/steps.py", SRC + "sharding/agreement.py"
DERIVATIVES = SRC + "geometry/derivatives.py"
COUPLED, AFTER, POINT = (SRC + f"landing/{name}.py" for name in ("coupled", "after", "point"))

MUTANTS = [
    # Python: those that earlier tests had not noticed, then the measured step and the Gram form.
    Mutant("no edge", SRC + "safe_step.py", "EDGE = 16 ", "EDGE = 0 ", FREEZES),
    Mutant("start limit", SRC + "optim/weights.py", "1.0001 * radius", "1.1 * radius", START),
    Mutant("Adam's clamp", MOMENTS, "clamp(max=1e18 *", "clamp(max=1e19 *", ANY),
    Mutant("Adam's floor", MOMENTS, "roundoff * size).sqrt()", "0 * size).sqrt()", GRAM),
    Mutant(
        "Muon's shift", MUON, "(4 * roundoff * trace(T)", "(40 * roundoff * trace(T)", MUON_TESTS
    ),
    Mutant(
        "Muon's shift on ranks", MUON, "return 4 * roundoff", "return 40 * roundoff", MUON_TESTS
    ),
    Mutant("skew enough", SRC + "optim/loading.py", "<= 1e-3 * size", "<= 1e-1 * size", LOADING),
    Mutant("state count", COMPILED, "len(state) != n_state or ", "", RENEWED),
    Mutant(
        "first order",
        DERIVATIVES,
        "info > 0)[..., None, None], M",
        "info >= 0)[..., None, None], M",
        GRAM,
    ),
    Mutant("pull of coupled", COUPLED, "t, d, value=-2 * lam", "t, d, value=-4 * lam", SAFE),
    Mutant("share of coupled", COUPLED, "torch.fmin(t, t * share)", "t", SAFE),
    Mutant("longer share", COUPLED, "torch.fmin(t, t * share)", "t * share", SAFE),
    Mutant("longest step", COUPLED, "1 / (2 * lam) if", "1 / lam if", SAFE),
    Mutant("share of after", AFTER, ".masked_fill_(reached <= limit, 1.0)", ".fill_(1.0)", SAFE),
    Mutant("drift of after", AFTER, "share - square, C)", "0 * share, C)", GRAM),
    Mutant("mean of after", AFTER, ".clamp(min=1)", ".clamp(min=1).fill_(1)", GRAM),
    Mutant(
        "trial",
        SRC + "safe_step.py",
        "math.sqrt(2 * p) / norm).clamp(max=min",
        "1e3 / norm).clamp(max=min",
        ANY,
    ),
    Mutant("landed too soon", POINT, "LANDED = 16 ", "LANDED = 1e12 ", GRAM),
    Mutant("noise", SRC + "fields.py", "(8 + math.sqrt(n))", "0 * (8 + math.sqrt(n))", SAFE),
    # Compiled code: what all share.
    Mutant("C++ longest", STEPS, "1 / (2 * o.lam)", "1 / o.lam", SQUARE),
    Mutant("C++ edge", STEPS, "constexpr double EDGE = 16;", "constexpr double EDGE = 0;", FREEZES),
    Mutant("C++ root", STEPS, "slope >= 0 ? reach + slope", "slope >= 0 ? reach", SQUARE),
    Mutant("C++ distance 1", STEPS, "distance < FARTHEST);", "distance < 2);", FREEZES),
    Mutant("C++ gentle pull", STEPS, "omega = at_most(omega, at_least(gentle, 0));", "", SAFE),
    Mutant("C++ finite", STEPS, "at_least(o.scale, 1) * length <", "length / 1e9 <", ANY),
    Mutant("C++ bias", STEPS, "steps = old_steps + 1;", "steps = old_steps + 2;", SQUARE),
    Mutant("C++ farthest", STEPS, "o.farthest - distance", "1.5 * o.farthest - distance", SAFE),
    Mutant("C++ maximize", STEPS, "o.maximize ? T(-0.5) : T(0.5)", "T(0.5)", SQUARE),
    # Square matrices.
    Mutant("square free bound", LANDING, "+ t * t * q[l];", "+ t * t * q[l] / 4;", SAFE),
    Mutant("square damping", LANDING, "T(1 - o.dampening) : T(1)", "T(1) : T(1)", SQUARE),
    Mutant("square Nesterov", LANDING, "A.v[e] += momentum * B.v[e]", "A.v[e] += B.v[e]", SQUARE),
    Mutant(
        "square follow",
        LANDING,
        "G.v[e] + scale * (R.v[e] - G.v[e] / scale)",
        "scale * R.v[e]",
        SCALES,
    ),
    Mutant(
        "C++ count",
        SRC + "native/base.h",
        "finite[l] && eta[l] < o.lr)",
        "finite[l] && eta[l] > o.lr)",
        SQUARE,
    ),
    Mutant("square centring", LANDING, "c[l] = T(1 / std::sqrt(1 + m[l]))", "c[l] = T(1)", SQUARE),
    # Tall matrices.
    Mutant("tall roundoff", TALL_CPP, "epsilon() / 2) {}", "epsilon() * 1e6) {}", TALL),
    Mutant("tall landed", TALL_CPP, "if (most <= roundoff) return", "if (most <= 1) return", TALL),
    Mutant("tall series", TALL_CPP, "if (most * most <= roundoff) {", "if (most <= 1) {", TALL),
    Mutant("tall moderate", TALL_CPP, "sizeof(T) == 4 ? 1e24 : 1e200", "1e300", ANY),
    Mutant(
        "tall Nesterov", TALL_CPP, "g = sign + o.momentum * h", "g = sign * o.momentum + h", TALL
    ),
    Mutant("tall damping", TALL_CPP, "damped ? sign * (1 - o.dampening) : sign", "sign", TALL),
    Mutant("tall mean", TALL_CPP, "g = sign * (1 - o.beta1)", "g = sign * o.beta1", TALL),
    Mutant("tall little", TALL_CPP, "LITTLE = 0.125", "LITTLE = 1e6", TALL),
    Mutant("C++ share", STEPS, "at_most(room / at_least(reach, SMALLEST), 1)", "1", SAFE),
    Mutant(
        "C++ pulled share",
        STEPS,
        "P * at_least(room, 0))) / P, 1)",
        "P * at_least(room, 0))) / P, 9)",
        SAFE,
    ),
    # Ranks.
    Mutant("identity's share", SRC + "geometry/matrices.py", ".sub_(share)", ".sub_(1)", GRAM),
    Mutant("half of a sum", SHARDING, "D.triu() + T.tril(-1)", "D.triu() + T.tril()", GRAM),
    Mutant("diagonal lost", SHARDING, "packed[..., -1, :])", "packed[..., 0, :])", GRAM),
    Mutant("counts packed", SHARDING, "state[LIMITED] << 32", "state[LIMITED] << 31", RANKS),
    Mutant("skips agreed", SHARDING, "terms) == 0", "terms) >= 0", GUARDS),
    Mutant(
        "first gradient",
        MOMENTS,
        "1 - sums.others[-1].real.clamp(max=1)",
        "sums.others[-1].real.clamp(max=1)",
        GRAM,
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


def is_killed(mutant: Mutant, copy: Path) -> bool:
    """Whether the mutant's tests fail."""
    path, start = copy / mutant.file, time.perf_counter()
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "not slow_distributed", *mutant.tests.split()],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    killed = "\nFAILED " in done.stdout  # with -x and -n pytest also says that it was interrupted
    if not killed and done.returncode != 0:
        print(done.stdout[-2000:], done.stderr[-2000:])
    verdict = "killed" if killed else "SURVIVED" if done.returncode == 0 else "BROKEN"
    print(f"{verdict:9} {mutant.name} ({time.perf_counter() - start:.0f} s)", flush=True)
    return killed


if __name__ == "__main__":
    sys.exit(main())
