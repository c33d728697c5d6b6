"""Flink SQL in its own MiniCluster, over the log in Debezium's form; run by Flink's interpreter.

Arguments, as one JSON object on stdin: `servers`, `source`, `ends` (partition → offset to read up
to), `out` and `latest` (topics), `work` (folder), `connector` (jar). Prints seconds as JSON.
"""

import json
import os
import sys
import time

began = time.time()

import pyflink  # noqa: E402

os.environ.setdefault("FLINK_HOME", os.path.dirname(pyflink.__file__))
os.environ.setdefault("JVM_ARGS", "-Xmx2g")

from pyflink.common import Configuration  # noqa: E402
from pyflink.table import EnvironmentSettings, TableEnvironment  # noqa: E402

STATE = (
    "id string, country string, status string, total decimal(12, 2), "
    "lines array<row<sku string, qty bigint>>"
)


def environment(work: str, connector: str) -> TableEnvironment:
    """As Flink is set up for production, with the state on disk."""
    settings = {
        "pipeline.jars": f"file://{connector}",
        "parallelism.default": "2",
        "execution.checkpointing.interval": "1000 ms",
        "state.backend.type": "rocksdb",
        "execution.checkpointing.storage": "filesystem",
        "execution.checkpointing.dir": f"file://{work}",
        "execution.checkpointing.incremental": "true",
        "rest.port": "0",
        "rest.bind-address": "127.0.0.1",
        "rest.address": "127.0.0.1",
        "taskmanager.numberOfTaskSlots": "4",
        "taskmanager.memory.network.max": "128mb",
    }
    configuration = Configuration()
    for name, value in settings.items():
        configuration.set_string(name, value)
    made = EnvironmentSettings.new_instance().in_streaming_mode()
    return TableEnvironment.create(made.with_configuration(configuration).build())


def main() -> None:
    """Fill both tables from the log, up to the given offsets."""
    given = json.load(sys.stdin)
    t_env = environment(given["work"], given["connector"])
    kafka = f"'properties.bootstrap.servers' = '{given['servers']}'"
    ends = ";".join(f"partition:{part},offset:{end}" for part, end in given["ends"].items())
    t_env.execute_sql(
        f"create table purchases ({STATE}, primary key (id) not enforced) with ("
        f"'connector' = 'kafka', 'topic' = '{given['source']}', {kafka}, "
        "'scan.startup.mode' = 'earliest-offset', 'scan.bounded.mode' = 'specific-offsets', "
        f"'scan.bounded.specific-offsets' = '{ends}', 'format' = 'debezium-json')"
    )
    for name, columns, key in (
        (
            "totals",
            "country string, status string, n bigint, total decimal(38, 2)",
            "country, status",
        ),
        ("latest", STATE, "id"),
    ):
        topic = given["out"] if name == "totals" else given["latest"]
        t_env.execute_sql(
            f"create table {name} ({columns}, primary key ({key}) not enforced) with ("
            f"'connector' = 'upsert-kafka', 'topic' = '{topic}', {kafka}, "
            "'properties.compression.type' = 'lz4', 'key.format' = 'json', "
            "'value.format' = 'json')"
        )
    jobs = t_env.create_statement_set()
    jobs.add_insert_sql(
        "insert into totals select country, status, count(*), sum(total) from purchases "
        "group by country, status"
    )
    jobs.add_insert_sql("insert into latest select * from purchases")
    job = jobs.execute()
    submitted = time.time()
    job.wait()
    done = time.time()
    print(json.dumps({"start_s": submitted - began, "seconds": done - submitted}))


if __name__ == "__main__":
    main()
