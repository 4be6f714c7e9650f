"""Solvers take turns, are checked by the benchmark's own rule, and shown as recorded."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ortholand.geometry import distance
from ortholand_lab.benchmarks import BENCHMARKS
from ortholand_lab.benchmarks.solvers import (
    ALONE,
    DEFAULT,
    SOLVERS,
    SOLVERS_LARGE,
    SOLVERS_MINUTE,
    SOLVERS_USERS,
    claims_about,
    median_times,
    runs,
    runs_of,
    summary,
    table,
    tables_of,
)
from ortholand_lab.benchmarks.solvers.catalogue import LARGE, MINUTE, PROBLEMS, USERS, USUAL
from ortholand_lab.benchmarks.solvers.oracle import Oracle, Stop
from ortholand_lab.benchmarks.solvers.peers import PARTICIPANTS, Attempt, Solver
from ortholand_lab.benchmarks.solvers.problems import (
    Case,
    decaying_pca,
    gaussian,
    in_numpy,
    nearest,
)
from ortholand_lab.benchmarks.solvers.runs import SolverRun, SolverSettings, Trial, available
from ortholand_lab.benchmarks.solvers.users import laplacian
from ortholand_lab.cli import app
from ortholand_lab.problems import ICA, PCA, Brockett, KohnSham, Procrustes
from ortholand_lab.study.records import (
    MissingRecordError,
    Record,
    Records,
    Request,
    Result,
    RunOptions,
)
from ortholand_lab.study.spec import Context, Verdict

SMALL = {
    "procrustes": Procrustes.planted(4, columns=6, seed=0),
    "ica": ICA.planted(3, 50, seed=0),
    "pca": PCA.with_gap(6, 2, seed=0),
    "brockett": Brockett.linear(6, 2, seed=0),
    "kohn-sham": KohnSham(7, 2, alpha=0.7),
}


def tiny():
    return gaussian(seed=0, p=5)


# Problems.


@pytest.mark.parametrize("name", SMALL)
def test_numpy_functions_are_those_of_the_library(name):
    problem = SMALL[name]
    X, V = (torch.randn(*problem.shape, dtype=torch.float64, generator=g) for g in generators())
    cost, gradient, hessian = in_numpy(problem)(X.numpy())
    close = dict(rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(float(cost()), problem.fun(X).item(), **close)
    np.testing.assert_allclose(gradient(), problem.grad(X).numpy(), **close)
    np.testing.assert_allclose(hessian(V.numpy()), problem.hessp(X, V).numpy(), **close)


def generators():
    return [torch.Generator().manual_seed(seed) for seed in (0, 1)]


def test_a_problem_that_is_not_in_numpy_is_an_error():
    with pytest.raises(TypeError, match="PCA"):
        in_numpy(PCA.with_gap(6, 2, diagonal=True))


@pytest.mark.parametrize("name", [*USUAL, *MINUTE])
def test_starts_are_on_the_manifold_and_above_the_optimum(name):
    case = PROBLEMS[name][1](0)
    assert distance(torch.from_numpy(case.X0)).max() < 1e-12
    unknown = name == "ica" or name.startswith("kohn-sham")
    assert math.isnan(case.optimum) == unknown
    if not unknown:
        assert case.cost(case.X0) > case.optimum
    assert case.start_norm > 0


@pytest.mark.parametrize("name", USERS)
def test_derivatives_of_problems_as_users_bring_them(name):
    case, random = PROBLEMS[name][1](0), np.random.default_rng(1)
    X = case.X0
    V = random.standard_normal(X.shape).astype(X.dtype)
    if X.dtype.kind == "c":
        V = V + 1j * random.standard_normal(X.shape)
    V, h = V / np.linalg.norm(V), 1e-5
    after, before = case.at(X + h * V), case.at(X - h * V)
    slope = (float(after[0]()) - float(before[0]())) / (2 * h)
    assert slope == pytest.approx(np.vdot(case.at(X)[1](), V).real, rel=1e-6)
    change = (after[1]() - before[1]()) / (2 * h)
    np.testing.assert_allclose(case.at(X)[2](V), change, atol=1e-6 * np.linalg.norm(change))
    assert distance(torch.from_numpy(X)).max() < 1e-12


def test_solvers_that_cannot_have_a_problem_are_left_out():
    span, stack, plain = (PROBLEMS[name][1](0) for name in ("kohn-sham", "rotations", "ica"))
    grassmann, trust, smopt = (
        PARTICIPANTS[name] for name in ("pymanopt-tr-grassmann", "pymanopt-tr", "smopt-slpg")
    )
    assert [grassmann.fits(case) for case in (span, stack, plain)] == [True, False, False]
    assert [trust.fits(case) for case in (span, stack, plain)] == [True, True, True]
    assert [smopt.fits(case) for case in (span, stack, plain)] == [True, False, True]
    unitary, grid = (PROBLEMS[name][1](0) for name in ("orbitals", "laplacian"))
    eigen, autograd = PARTICIPANTS["eigsh"], PARTICIPANTS["torch-lbfgs"]
    assert [one.fits(unitary) for one in (grassmann, smopt, eigen)] == [True, False, False]
    assert [one.fits(grid) for one in (grassmann, smopt, eigen, autograd)] == [
        True,
        True,
        True,
        False,
    ]


def test_the_optimum_of_procrustes_can_be_reached_from_the_start():
    for seed in range(6):
        case = gaussian(seed, p=5)
        reached = Trial(PARTICIPANTS["ortholand-newton-numpy"], case, 1e-8, 10).attempt()
        cost = case.cost(reached.X)
        assert cost >= case.optimum - 1e-12
        signs = [np.linalg.det(X) > 0 for X in (reached.X, case.X0)]
        assert signs[0] == signs[1]
    for seed in range(4):
        case = PROBLEMS["procrustes-planted"][1](seed)
        solution = case.problem.solution().numpy()
        assert np.linalg.det(solution) * np.linalg.det(case.X0) > 0
        assert abs(case.optimum) < 1e-20


def test_nearest_projects_and_gives_up_on_what_is_not_finite():
    X = tiny().X0 * 1.1
    np.testing.assert_allclose(nearest(X), tiny().X0, atol=1e-14)
    assert np.isnan(nearest(np.full((3, 2), np.inf))).all()


# The oracle.


def test_a_question_is_counted_once_at_each_of_the_last_two_points():
    case = tiny()
    oracle, X, Y = Oracle(case), case.X0, case.X0 + 1e-3
    for Z in (X, X, Y, X, Y):
        oracle.fun(Z)
        oracle.grad(Z)
    oracle.fun_and_grad(Y)
    assert oracle.counts == (2, 2, 0)
    oracle.fun(X + 1)  # forgets X or Y
    oracle.fun(X)
    oracle.hessp(X, Y)
    oracle.hessp(X, Y)
    assert oracle.counts == (4, 2, 2)


def test_a_point_that_the_solver_changes_is_another_point():
    case = tiny()
    oracle, X = Oracle(case), case.X0.copy()
    before = oracle.fun(X)
    X[0, 0] += 0.1
    assert oracle.fun(X) != before
    assert oracle.counts[0] == 2


def test_the_oracle_ends_a_run_by_time_by_count_and_when_the_rule_holds():
    case = tiny()
    with pytest.raises(Stop):
        Oracle(case, deadline=0.0).fun(case.X0)
    by_count = Oracle(case, last_gradient=2)
    by_count.grad(case.X0)
    with pytest.raises(Stop):
        by_count.grad(case.X0 + 1)
    seen = []
    watched = Oracle(case, watch=lambda X: bool(seen.append(X)) or len(seen) == 2)
    watched.grad(case.X0)
    watched.grad(case.X0)  # the same question
    with pytest.raises(Stop):
        watched.grad(case.X0 + 1)
    np.testing.assert_array_equal(watched.last, case.X0 + 1)
    assert watched.pause > 0


# One solver.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(PARTICIPANTS))
def test_every_solver_reaches_a_loose_tolerance(name):
    if not available([name]):
        pytest.skip("not installed")
    problem = Brockett.linear(8, 3, seed=0)
    case = Case(problem, problem.start(0).numpy())
    if PARTICIPANTS[name].of_span:
        case = decaying_pca(seed=0, n=8, p=3)
    if PARTICIPANTS[name].eigen:
        case = laplacian(5, 3, seed=0)
    trial = Trial(PARTICIPANTS[name], case, gtol=1e-2, maxtime=20)
    trial.settle()
    assert trial.reached
    run = trial.as_run(0, 0)
    assert run.reduction <= 1e-2
    assert run.gradients > 0
    trial.repeat()
    first, second = trial.attempts
    assert first.counts == second.counts
    np.testing.assert_array_equal(first.X, second.X)


def easy_case():
    problem = PCA.with_gap(8, 3, gap=0.5, seed=0)
    return Case(problem, problem.start(0).numpy(), float(problem.optimum()))


def descent(oracle, tolerance, *, stops=True):
    """Projected gradient descent, which stops when its own rule holds, or never."""
    X = oracle.case.X0
    while True:
        oracle.iterations += 1
        G = oracle.grad(X)
        if stops and oracle.case.riemannian_norm(X) <= tolerance:
            return Attempt(X, oracle.iterations, success=True)
        X = nearest(X - G)


def test_a_run_stopped_from_outside_ends_at_the_first_gradient_where_the_rule_holds():
    trial = Trial(
        Solver("descent", lambda o, t: descent(o, t, stops=False), stops=False),
        easy_case(),
        gtol=1e-3,
        maxtime=20,
    )
    own = Trial(Solver("descent", descent), easy_case(), gtol=1e-3, maxtime=20)
    for one in (trial, own):
        one.settle()
        assert one.reached
    assert trial.as_run(0, 0).gradients == own.as_run(0, 0).gradients
    assert trial.as_run(0, 0).iterations == own.as_run(0, 0).iterations > 0


def test_a_tolerance_that_is_too_loose_for_the_rule_is_tightened():
    lax = Solver("lax", lambda oracle, tolerance: descent(oracle, 4 * tolerance))
    trial = Trial(lax, easy_case(), gtol=1e-3, maxtime=20)
    trial.settle()
    assert trial.reached
    assert trial.as_run(0, 0).tightening == 0.2


def test_a_solver_that_says_it_has_got_there_is_not_believed():
    calls = []

    def liar(oracle, tolerance):
        calls.append(tolerance)
        return Attempt(oracle.case.X0, 1, success=True)

    trial = Trial(Solver("liar", liar), tiny(), gtol=1e-3, maxtime=20)
    trial.settle()
    assert not trial.reached
    assert len(calls) == len(runs.TIGHTENINGS)
    assert trial.as_run(0, 0).reduction == pytest.approx(1)


def test_a_point_off_the_manifold_is_judged_where_it_projects_to():
    case = easy_case()
    solution = case.problem.solution().numpy()
    trial = Trial(PARTICIPANTS["smopt-slpg"], case, gtol=1e-6, maxtime=1)
    assert trial.holds(solution)
    assert trial.holds(solution * (1 + 1e-7))
    assert not trial.holds(case.X0)
    assert not trial.holds(np.full_like(solution, np.nan))


def test_out_of_time_or_failed_is_a_result(caplog):
    def failing(oracle, tolerance):
        oracle.grad(oracle.case.X0)
        raise FloatingPointError("no")

    slow = Trial(Solver("slow", lambda o, t: descent(o, t, stops=False)), tiny(), 1e-3, 0.05)
    failed = Trial(Solver("failing", failing), tiny(), 1e-3, 20)
    for trial in (slow, failed):
        trial.settle()
        assert not trial.reached
        assert trial.as_run(0, 0).gradients > 0
    assert 0.04 < slow.attempts[0].processor_seconds < 2
    assert "failing: FloatingPointError('no')" in caplog.text


def test_whoever_cannot_be_imported_is_left_out(monkeypatch):
    def missing(oracle, tolerance):
        raise ModuleNotFoundError("No module named 'peer'")

    monkeypatch.setitem(PARTICIPANTS, "missing", Solver("missing", missing))
    assert available(["missing", "ortholand-bb-numpy"]) == ["ortholand-bb-numpy"]


# A contest.

SETTINGS = SolverSettings(
    problems=("toy",), solvers=("a", "b"), seeds=4, gtols=(1e-2, 1e-3), maxtime=5, patience=2
)


@pytest.fixture
def contest(monkeypatch):
    """Two solvers: ``a`` reaches all, ``b`` the seeds and tolerances that it is told to."""
    told, asked = set(), []

    def solution(oracle):
        return Attempt(oracle.case.problem.solution().numpy(), 1, success=True)

    def a(oracle, tolerance):
        asked.append("a")
        return solution(oracle)

    def b(oracle, tolerance):
        asked.append("b")
        gtol = tolerance / oracle.case.start_norm
        if (round(oracle.case.optimum), round(-math.log10(gtol))) in told:
            return solution(oracle)
        return Attempt(oracle.case.X0, 1)

    def make(seed):  # the optimum carries the seed to the solver
        return replace(easy_case(), optimum=float(seed))

    for name, solver in (("a", a), ("b", b)):
        monkeypatch.setitem(PARTICIPANTS, name, Solver(name, solver, ours=name == "a"))
    monkeypatch.setitem(PROBLEMS, "toy", ("Toy", make))
    monkeypatch.setattr(runs.gc, "collect", lambda: 0)  # slow here, where so much is imported

    def run(wins, task=SETTINGS, seed=0, ticks=None):
        told.update(wins)
        tick = (lambda steps: None) if ticks is None else ticks.append
        result = runs.run(task, Context(seed, torch.device("cpu"), tick))
        return record_of("toy", result, task), asked

    return run


def record_of(unit, result, task):
    configuration = {"solvers": list(task.solvers), "gtols": list(task.gtols), "seeds": task.seeds}
    request = Request("solvers", 1, unit, RunOptions("full", 0, "cpu", 1), configuration, {})
    return Record(request, result, {}, 1.0, "2026-01-01T00:00:00+00:00")


def seeds_of(record, solver, gtol):
    return [run.seed for run in runs_of(record, gtol).get(solver, [])]


def test_whoever_missed_the_looser_tolerance_is_not_run_to_the_tighter(contest):
    ticks = []
    wins = {(1, 2), (2, 2), (3, 2), (2, 3), (3, 3)}
    record, _ = contest(wins, replace(SETTINGS, patience=4), ticks=ticks)
    assert seeds_of(record, "a", 1e-2) == seeds_of(record, "a", 1e-3) == [0, 1, 2, 3]
    assert seeds_of(record, "b", 1e-2) == [0, 1, 2, 3]
    assert seeds_of(record, "b", 1e-3) == [1, 2, 3]
    assert sum(ticks) == 4 * 2 * 2


def test_whoever_missed_too_many_seeds_is_left_out(contest):
    record, _ = contest({(0, 2), (2, 2)})
    assert seeds_of(record, "b", 1e-2) == [0, 1, 2, 3]  # misses 1 and 3
    assert seeds_of(record, "b", 1e-3) == [0]  # misses 0; 1 was left out, which is a miss as well
    cells = {row[0]: row for row in table("toy", 1e-3, Records({"toy": record}))}
    assert cells["a"][1] == "4 of 4"
    assert cells["b"][1] == "0 of 1*"


def test_seeds_begin_at_the_seed_of_the_run(contest):
    record, _ = contest(set(), replace(SETTINGS, seeds=2), seed=5)
    assert seeds_of(record, "a", 1e-2) == [5, 6]


def test_short_runs_are_repeated_in_turn_and_long_or_missed_ones_are_not(contest, monkeypatch):
    once = replace(SETTINGS, seeds=1, gtols=(1e-2,), repeats=4)
    _, asked = contest(set(), once)
    assert asked.count("a") == 1 + 4  # warm-up
    assert asked.count("b") == 1 + 1
    asked.clear()
    monkeypatch.setattr(runs, "SHORT", 0.0)
    contest(set(), once)
    assert asked.count("a") == 1 + 1


def test_solvers_take_turns_in_an_order_of_each_seed(contest, monkeypatch):
    monkeypatch.setattr(runs, "SHORT", 0.0)
    many = replace(SETTINGS, seeds=12, gtols=(1e-2,), patience=99)
    _, asked = contest({(seed, 2) for seed in range(12)}, many)
    pairs = ["".join(asked[2 + i : 4 + i]) for i in range(0, 24, 2)]
    assert set(pairs) == {"ab", "ba"}


# Tables and claims.


def made_run(**changes):
    usual = dict(
        solver=0,
        seed=0,
        gtol=1e-6,
        reached=True,
        seconds=1.0,
        processor_seconds=0.9,
        iterations=10,
        costs=12,
        gradients=11,
        hessian_products=0,
        reduction=5e-7,
        orthogonality=1e-15,
        value=1.0,
        start=2.0,
        optimum=1.0,
        tightening=1.0,
    )
    return SolverRun(**(usual | changes))


TASK = SolverSettings(
    solvers=("ortholand-newton-numpy", "pymanopt-tr", "smopt-slpg"), gtols=(1e-6,), seeds=3
)


def made_record(rows, unit="ica", task=TASK):
    series = {f.name: [float(getattr(row, f.name)) for row in rows] for f in fields(SolverRun)}
    return record_of(unit, Result(series, {}), task)


def times(*seconds, solver=0, **changes):
    """A run for each seed; None is a miss."""
    return [
        made_run(
            solver=solver,
            seed=i,
            processor_seconds=s or 7.0,
            reached=s is not None,
            **changes,
        )
        for i, s in enumerate(seconds)
    ]


def test_a_miss_has_taken_infinitely_long():
    rows = [
        *times(1.0, 3.0, 2.0),
        *times(1.0, None, None, solver=1),
        *times(1.0, 2.0, None, solver=2),
    ]
    found = median_times(runs_of(made_record(rows), 1e-6))
    assert list(found.values()) == [2.0, math.inf, 2.0]
    # Left out after one miss: the seeds that are missing are misses, too.
    rows = [*times(1.0, 3.0, 2.0), *times(0.1, None, solver=1)]
    assert median_times(runs_of(made_record(rows), 1e-6))["pymanopt-tr"] == math.inf


def test_the_table_has_the_fastest_first_and_the_nearest_of_those_who_missed():
    rows = [
        *times(4.0, 4.0, 4.0),
        *times(None, solver=1, reduction=1e-4, iterations=0),
        *times(None, None, None, solver=2, reduction=1e-5, value=1.5),
    ]
    head, *body = table("ica", 1e-6, Records({"ica": made_record(rows)}))
    assert [row[0] for row in body] == [
        'ortholand "newton" (NumPy, jac)',
        "smopt slpg",
        "pymanopt trust regions",
    ]
    cells = dict(zip(head, body[0], strict=True))
    assert (cells["reached"], cells["time, s"], cells["to best peer"]) == ("3 of 3", "4", "")
    assert (cells["iterations"], cells["Hessians"]) == ("10", "0")
    assert (cells["gradient by"], cells["excess cost"]) == ("5.0e-07", "0")
    smopt, pymanopt = (dict(zip(head, row, strict=True)) for row in body[1:])
    assert (smopt["reached"], smopt["time, s"], smopt["excess cost"]) == (
        "0 of 3",
        "not in 7",
        "5e-01",
    )
    assert (pymanopt["reached"], pymanopt["iterations"]) == ("0 of 1*", "?")


def test_times_are_compared_with_the_best_peer():
    rows = [*times(1.0), *times(2.0, solver=1), *times(4.0, solver=2)]
    _, *body = table("ica", 1e-6, Records({"ica": made_record(rows)}))
    assert [row[3] for row in body] == ["0.50", "1.00", "2.00"]


def test_where_no_optimum_is_known_the_least_cost_that_anyone_found_is_taken():
    rows = [
        *times(1.0, value=1.25, optimum=math.nan),
        *times(2.0, solver=1, value=1.0, optimum=math.nan),
    ]
    _, *body = table("ica", 1e-6, Records({"ica": made_record(rows)}))
    assert [row[-1] for row in body] == ["2e-01", "0"]


def test_a_table_without_runs_is_missing():
    record = made_record(times(1.0))
    with pytest.raises(MissingRecordError, match="1e-10 on ica"):
        table("ica", 1e-10, Records({"ica": record}))
    tables = tables_of("solvers", list(PROBLEMS))
    assert len(tables) == len({spec.name for spec in tables}) == 1 + 2 * len(PROBLEMS)


def test_the_summary_has_the_default_the_best_of_ours_and_the_best_peer():
    task = replace(TASK, solvers=(DEFAULT, "ortholand-bb-numpy", "smopt-slpg"))
    rows = [*times(3.0), *times(1.0, solver=1), *times(2.0, solver=2)]
    head, row = summary(Records({"ica": made_record(rows, task=task)}))
    cells = dict(zip(head[2:], row[2:], strict=True))
    assert (cells["default, s"], cells["best of ours"]) == ("3", '"bb" (NumPy, jac)')
    assert (cells["best peer"], cells["default / peer"], cells["best / peer"]) == (
        "smopt slpg",
        "1.50",
        "0.50",
    )
    missed = made_record([*times(3.0), *times(None, solver=2)], task=task)
    _, row = summary(Records({"ica": missed}))
    assert row[5:9] == ["none gets there", "inf", "", ""]
    with pytest.raises(MissingRecordError):
        summary(Records({}))


CLAIMS = [*claims_about(list(PROBLEMS)), ALONE]


def verdicts(ours, peer, *, newton=True):
    task = replace(TASK, gtols=(1e-6, 1e-10), seeds=1)
    rows = [
        row
        for gtol in task.gtols
        for row in (
            *times(ours, gtol=gtol, solver=0 if newton else 1),
            *times(peer, solver=2, gtol=gtol),
            *times(ours, solver=3, gtol=gtol),
        )
    ]
    second = TASK.solvers[1] if newton else "ortholand-bb-numpy"
    task = replace(
        task,
        solvers=("ortholand-newton-numpy", second, "smopt-slpg", "ortholand-default-numpy"),
    )
    records = Records({name: made_record(rows, name, task) for name in PROBLEMS})
    return [claim.judge(records).verdict for claim in CLAIMS]


def test_every_claim_can_hold_and_fail_and_is_open_without_records():
    assert set(verdicts(1.0, None)) == {Verdict.HOLDS}
    assert set(verdicts(None, 2.0)) == {Verdict.FAILS}
    faster = verdicts(1.0, 2.0)
    assert faster == [Verdict.HOLDS] * (len(CLAIMS) - 1) + [Verdict.FAILS]  # a peer gets there, too
    assert verdicts(1.0, 2.0, newton=False)[-2] is Verdict.FAILS
    assert {claim.judge(Records({})).verdict for claim in CLAIMS} == {Verdict.OPEN}


def test_without_peers_nobody_is_the_fastest():
    records = Records({name: made_record(times(1.0), name) for name in PROBLEMS})
    assert CLAIMS[0].judge(records).verdict is Verdict.OPEN


# The study.


def test_presets_name_what_there_is_and_grow():
    assert BENCHMARKS["solvers"] is SOLVERS
    assert BENCHMARKS["solvers-large"] is SOLVERS_LARGE
    assert BENCHMARKS["solvers-minute"] is SOLVERS_MINUTE
    studies = (SOLVERS, SOLVERS_LARGE, SOLVERS_MINUTE, SOLVERS_USERS)
    for settings in [settings for study in studies for settings in study.settings.values()]:
        assert set(settings.problems) <= set(PROBLEMS)
        assert set(settings.solvers) <= set(PARTICIPANTS)
        assert list(settings.gtols) == sorted(settings.gtols, reverse=True)
    assert SOLVERS.whole.seeds == 5
    assert SOLVERS.whole.gtols == (1e-6, 1e-10)
    assert [unit.name for unit in SOLVERS.units("full")] == list(USUAL)
    assert [unit.name for unit in SOLVERS_LARGE.units("full")] == list(LARGE)
    assert [unit.name for unit in SOLVERS_MINUTE.units("full")] == list(MINUTE)
    assert {*USUAL, *LARGE, *MINUTE, *USERS} == set(PROBLEMS)
    assert all(unit.timed for unit in SOLVERS.units("full"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_command_runs_writes_tables_and_resumes(tmp_path):
    command = ["bench", "solvers", "--preset", "smoke", "--out", str(tmp_path)]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    markdown = (tmp_path / "tables" / "solvers-procrustes-planted-1e-06-smoke-seed0.md").read_text()
    assert "| ortholand, default (NumPy, jac) | 1 of 1 |" in markdown
    again = CliRunner().invoke(app, command)
    assert "recorded already" in again.output
    assert (tmp_path / "report.html").exists()
