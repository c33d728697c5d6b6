"""riders: twenty views beside two: what a view costs beyond the writing of its own rows."""

from __future__ import annotations

from dataclasses import replace

from bench.cpu import Highest, Spent, spent
from bench.data import ENTITY, Purchase
from bench.keep import kept
from bench.report import Reach, Result, result
from bench.session import Session
from everstate.app import App

COUNT = 1_000_000
FEW, MANY = 2, 20
_CENTS = 4_000


def riders(count: int) -> App:
    """Latest and so many views of sums, each over other purchases."""
    made = App("riders")
    made.entity(ENTITY, key="id", schema_version=1, history=False)(Purchase)
    for number in range(count):
        made.view(
            f"above_{number}",
            sql=f"SELECT country, status, count(*) AS purchases, sum(total) AS total FROM {ENTITY} "
            f"WHERE total > {number * _CENTS / 100} GROUP BY country, status",
        )
    return made


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    filled = session.filled(count)

    def cost(app: App) -> Spent:
        config = session.fresh(filled)
        before = spent(session.servers)
        try:
            with Highest(session.servers) as highest:
                kept(session, config, count, app)
            took = spent(session.servers).since(before)
            return replace(took, workers_mib=highest.workers_mib)
        finally:
            session.drop(config)

    few, many = riders(FEW), riders(MANY)
    pairs = []
    for turn in range(-2, session.repeat):
        pair = cost(few), cost(many)
        session.say(f"[dim]  {FEW} riders: {pair[0]}\n  {MANY} riders: {pair[1]}[/dim]")
        if turn >= 0:
            pairs.append(pair)
    # What a view writes is its own affair, and PostgreSQL's.
    values = [_beside_writes(many) / count * 1e6 for _, many in pairs]
    floors = [_beside_writes(few) / count * 1e6 for few, _ in pairs]
    return [
        result(
            "riders",
            f"{MANY} views of sums, {count:,} changes, without what PostgreSQL takes",
            "µs of processors",
            values,
            floors=floors,
            floor_is=f"{FEW} views",
            reach=Reach(ratio_max=1.15),
        ),
        result(
            "riders",
            "the same with PostgreSQL",
            "µs of processors",
            [many.total / count * 1e6 for _, many in pairs],
            floors=[few.total / count * 1e6 for few, _ in pairs],
            floor_is=f"{FEW} views",
        ),
        result(
            "riders",
            "memory of the Python workers",
            "MiB",
            [many.workers_mib for _, many in pairs],
        ),
    ]


def _beside_writes(cost: Spent) -> float:
    return cost.total - cost.seconds["postgres"]
