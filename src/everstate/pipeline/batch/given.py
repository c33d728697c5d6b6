"""Rows of a view over states that a test gives: neither a log nor an archive has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyspark.sql import functions as F

from everstate.changes import EntityType
from everstate.config import Config
from everstate.pipeline.batch.rows import Accepted, as_written, batch_rows, entities_read
from everstate.pipeline.spark.session import spark_errors, spark_session
from everstate.pipeline.spark.states import state_read
from everstate.views.kinds import ViewPlan

_GIVEN = "key string, state string"


def given_rows(
    config: Config,
    plan: ViewPlan,
    entity_types: Mapping[str, EntityType],
    states: Mapping[str, Sequence[tuple[str, bytes]]],
) -> pa.Table:
    """Rows that readers see of a view over ``states``: key and JSON, by name of entity type.

    Raises PipelineError with Spark's reason when what is kept of one of them cannot be computed.
    """
    spark = spark_session(config)

    def accepted(entity: str) -> Accepted:
        texts = [(key, state.decode()) for key, state in states.get(entity, ())]
        given = spark.createDataFrame(texts, _GIVEN)
        message = F.concat(F.lit('{"state":'), F.col("state"), F.lit("}"))
        own = {"version": F.lit(1), "partition": F.lit(0), "is_newest": F.lit(True)}
        current = state_read(message, "state", entity_types[entity])
        return Accepted(
            entity_types[entity],
            given.select(
                "key", *(each.alias(name) for name, each in own.items()), current.alias("current")
            ),
        )

    with spark_errors(f"view {plan.name}"):
        for part in plan.parts or (plan,):
            # Readers may see less than is kept, and Spark computes no more than is asked for.
            with batch_rows(part, [accepted(part.entity)]) as kept:
                kept.write.format("noop").mode("overwrite").save()
        read = [accepted(entity) for entity in entities_read(plan)]
        return as_written(plan, read, plan.batch_as_shown).toArrow()
