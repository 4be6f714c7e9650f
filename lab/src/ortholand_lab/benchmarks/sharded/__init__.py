"""Steps of sharded weights: their cost, counted and on paper, and how peers handle them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ortholand_lab.benchmarks.sharded.costs import BYTES, SCENES, predict
from ortholand_lab.benchmarks.sharded.counting import ROWS, WAYS, WIDE, Case, count_all
from ortholand_lab.benchmarks.sharded.peers import LIBRARIES, OURS, outcome, train_all
from ortholand_lab.benchmarks.sharded.ranks import on_ranks
from ortholand_lab.study.records import Record, Records, Result
from ortholand_lab.study.spec import Claim, Context, Finding, Study, TableSpec, Unit

MEASURED = ("received", "products", "seconds")
TALL_OR_WIDE = (ROWS, "LandingAdam, rows", WIDE)  # square matrices have owners
TOLERANCE = 1e-4  # that weights may be away from orthogonal, in float32


@dataclass(frozen=True)
class ShardedSettings:
    """The numbers of ranks, and the matrices stepped: n, p, k. Times are medians of a few steps."""

    ranks: tuple[int, ...] = (2, 4)
    tall: tuple[int, int, int] = (2048, 64, 4)
    wide: tuple[int, int, int] = (2048, 64, 1)  # turned
    square: tuple[int, int, int] = (128, 128, 4)  # from 192 on, a CPU copies half of a Gram matrix
    steps: int = 5


@dataclass(frozen=True)
class ShardedTask:
    """Cases to count; if there are none, libraries that train a sharded layer."""

    ranks: int
    cases: tuple[Case, ...] = ()
    steps: int = 0


def plan(settings: ShardedSettings) -> list[Unit[ShardedTask]]:
    """Counts on each number of ranks, and peers; timed, since they start their own processes."""
    cases = [Case(way, *(settings.wide if way == WIDE else settings.tall)) for way in WAYS]
    cases += [Case(way, *settings.square) for way in WAYS if way not in TALL_OR_WIDE]
    units = [
        Unit(f"counts-{ranks}", ShardedTask(ranks, tuple(cases), settings.steps), len(cases), True)
        for ranks in settings.ranks
    ]
    return [*units, Unit("peers", ShardedTask(2), len(LIBRARIES), True)]


def run(task: ShardedTask, context: Context) -> Result:
    """Counts of the busiest rank, by case; or the outcome of each library."""
    if not task.cases:
        seen, *_ = on_ranks(task.ranks, train_all, tick=context.tick)
        return Result({}, {name: value for result in seen for name, value in result.items()})
    seen = on_ranks(task.ranks, count_all, task.cases, task.steps, tick=context.tick)
    names = dict.fromkeys(name for of_rank in seen for counts in of_rank for name in counts)
    of_cases = list(zip(*seen, strict=True))
    largest = {name: [max(c.get(name, 0) for c in ranks) for ranks in of_cases] for name in names}
    return Result(largest, {})


def counts(record: Record) -> Iterator[tuple[Case, dict[str, float]]]:
    """Every case with what was counted."""
    for i, case in enumerate(record.configuration["cases"]):
        yield Case(**case), {name: values[i] for name, values in record.result.series.items()}


def messages(found: dict[str, float]) -> str:
    """How many collectives of each kind."""
    return ", ".join(
        f"{n:g} {name}" for name, n in sorted(found.items()) if name not in MEASURED and n
    )


# --- claims


def formulas_hold(ranks: int, records: Records) -> Finding:
    """Numbers received and arithmetic, of every case."""
    cases = list(counts(records[f"counts-{ranks}"]))
    wrong = [
        f"{case.way}, {case.weights}: {found}, {case.cost(ranks)}"
        for case, found in cases
        if not case.agrees(found["received"], found["products"], ranks)
    ]
    return Finding.of("; ".join(wrong) or f"all {len(cases)} agree", not wrong)


def few_messages(records: Records) -> Finding:
    """The number of messages of landing steps, on two ranks."""
    found = {(case.way, messages(n)) for case, n in counts(records["counts-2"])}
    ours = sorted((way, sent) for way, sent in found if WAYS[way].messages)
    words = "; ".join(f"{way}: {sent}" for way, sent in ours)
    return Finding.of(words, all(sent == WAYS[way].messages for way, sent in ours))


def stays_orthogonal(records: Records) -> Finding:
    """The error of this library's layer."""
    values = dict(records["peers"].result.values)
    return Finding.of(outcome(OURS, values), values.get(OURS, 1.0) < TOLERANCE)


CLAIMS = (
    *(
        Claim.beyond(
            f"On {ranks} ranks, what is counted of a step equals what the formulas say.",
            partial(formulas_hold, ranks),
        )
        for ranks in (2, 4)
    ),
    Claim.beyond(
        "Landing steps all weights of a group with one all-reduce by rows, with two all-to-all by "
        "owners, with all three by columns.",
        few_messages,
    ),
    Claim.beyond(
        f"Landing keeps the weight of a sharded layer within {TOLERANCE:g} of orthogonal.",
        stays_orthogonal,
    ),
)


# --- tables


def counted_table(ranks: int, records: Records) -> list[list[str]]:
    """Counts, and what the formulas say."""
    head = ["step", "weights", "collectives", "KB received", "formula", "MFLOP", "formula"]
    rows = [[*head, "CPU ms"]]
    for case, found in counts(records[f"counts-{ranks}"]):
        cost = case.cost(ranks)
        sizes = [f"{x * BYTES / 1e3:.1f}" for x in (found["received"], cost.received)]
        flops = [f"{x / 1e6:.1f}" for x in (found["products"], cost.products)]
        if cost.decompositions:
            flops[1] += f" + {cost.decompositions / 1e6:.0f} *"
        sent, time = messages(found) or "none", f"{found['seconds'] * 1e3:.1f}"
        rows.append([case.way, case.weights, sent, *sizes, *flops, time])
    return rows


def predicted_table(scene: str, _: Records) -> list[list[str]]:
    """What the formulas predict for many GPUs."""
    return predict(*SCENES[scene])


def peers_table(records: Records) -> list[list[str]]:
    """What became of each library's weights."""
    values = dict(records["peers"].result.values)
    return [["library", "outcome"], *([name, outcome(name, values)] for name in LIBRARIES)]


TABLES = (
    *(
        TableSpec(
            f"sharded-counted-{ranks}",
            f"Counted on {ranks} ranks; * decompositions by the textbook, which are not counted",
            partial(counted_table, ranks),
        )
        for ranks in (2, 4)
    ),
    TableSpec("sharded-peers", "Ten steps of a layer under fully_shard, 2 ranks", peers_table),
    *(
        TableSpec(f"sharded-predicted-{i}", f"On paper: {scene}", partial(predicted_table, scene))
        for i, scene in enumerate(SCENES, 1)
    ),
)

SHARDED = Study(
    name="sharded",
    title="Messages and arithmetic of steps of sharded weights: counts, formulas, peers",
    summary=(
        "Collectives (CommDebugMode), the numbers in them and arithmetic (FlopCounterMode) of a "
        "step, on the busiest of a few gloo ranks of this machine, and what the formulas of "
        "docs/at_scale.md say of it; what they say of hundreds of GPUs, which nobody measured; and "
        "what becomes of other libraries' weights in a layer sharded by FSDP2. CPU time is that of "
        "the busiest rank: an order of magnitude, no more."
    ),
    settings={
        "smoke": ShardedSettings((2,), (512, 64, 4), (512, 8, 1), (64, 64, 4), steps=1),
        "quick": ShardedSettings(tall=(1024, 64, 4), wide=(1024, 64, 1)),
        "full": ShardedSettings(),
    },
    plan=plan,
    run=run,
    claims=CLAIMS,
    tables=TABLES,
    seconds={"smoke": 25, "quick": 60, "full": 200},
)
