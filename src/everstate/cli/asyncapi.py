"""An AsyncAPI 3.0 document of the topics that a project's other programs read and write."""

from __future__ import annotations

from typing import Final

import msgspec

from everstate.app import App
from everstate.changes.schemas import (
    DIALECT,
    SchemaObject,
    change_schema,
    model_schemas,
    state_schema,
)
from everstate.declarations.commands import CommandGroup
from everstate.log.topics import TopicNames
from everstate.sources.commands.wire import WireAnswer, WireCommand

_FORMAT: Final = "application/schema+json;version=draft-07"
_COMPACTED: Final = {"kafka": {"topicConfiguration": {"cleanup.policy": ["compact"]}}}
_HEADERS: Final = {
    "type": "object",
    "description": "CloudEvents 1.0 in Kafka's binary mode.",
    "required": ["ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time", "ce_subject"],
    "properties": {
        "ce_specversion": {"const": "1.0"},
        "ce_id": {"type": "string", "description": "Id of the change."},
        "ce_source": {"type": "string", "description": "Service that wrote the change."},
        "ce_type": {"type": "string"},
        "ce_time": {"type": "string", "format": "date-time"},
        "ce_subject": {"type": "string", "description": "Key of the entity."},
        "traceparent": {"type": "string"},
    },
}


def schema_files(app: App, topics: TopicNames) -> dict[str, SchemaObject]:
    """Every exported file by its name: a schema for each state and message, and `asyncapi.json`.

    `asyncapi.json` refers to the other files, which are beside it.
    """
    found: dict[str, SchemaObject] = {}
    for name, entity_type in app.entities.items():
        found[f"{name}.state.schema.json"] = state_schema(entity_type)
        found[f"{name}.change.schema.json"] = change_schema(entity_type)
    for name, group in app.command_groups.items():
        found[f"{name}.command.schema.json"] = command_schema(group)
        found[f"{name}.answer.schema.json"] = answer_schema(name)
    found["asyncapi.json"] = _document(app, topics)
    return found


def command_schema(group: CommandGroup) -> SchemaObject:
    """Schema of a command message; its data is that of the command's own model."""
    (_,), made = msgspec.json.schema_components((WireCommand,), ref_template="#/definitions/{name}")
    schema = {"$schema": DIALECT, **made["WireCommand"], "title": f"Command to {group.name}"}
    schema["properties"]["entity"] = {"const": group.name}
    roots, definitions = model_schemas(list(group.by_name.values()))
    choices = [
        {"properties": {"command": {"const": name}, "data": root}}
        for name, root in zip(group.by_name, roots, strict=True)
    ]
    return {**schema, "oneOf": choices, "definitions": definitions}


def answer_schema(entity: str) -> SchemaObject:
    """Schema of the answer to a command."""
    (_,), made = msgspec.json.schema_components((WireAnswer,), ref_template="#/definitions/{name}")
    schema = {"$schema": DIALECT, **made.pop("WireAnswer"), "title": f"Answer of {entity}"}
    schema["properties"]["entity"] = {"const": entity}
    return {**schema, "definitions": made}


def _document(app: App, topics: TopicNames) -> SchemaObject:
    channels: SchemaObject = {}
    operations: SchemaObject = {}
    messages: SchemaObject = {}
    for name, entity_type in app.entities.items():
        message = f"{name}.change"
        messages[message] = _message(message, f"A change of {name}", name, headers=_HEADERS)
        channels[f"{name}.changes"] = _channel(
            topics.changes(name), "Every change, in order for each key.", message
        )
        channels[f"{name}.state"] = {
            **_channel(topics.state(name), "The newest change of each key.", message),
            "bindings": _COMPACTED,
        }
        for channel in (f"{name}.changes", f"{name}.state"):
            operations[f"publish.{channel}"] = _operation("send", channel)
        messages[message]["x-schema-version"] = entity_type.schema_version
    for name in app.command_groups:
        for what, topic, text in (
            ("command", topics.commands(name), "Commands, which are decided in order."),
            ("answer", topics.replies(name), "Answers, in the partitions of their commands."),
        ):
            message = f"{name}.{what}"
            messages[message] = _message(message, f"{what.capitalize()} of {name}", name)
            channels[f"{name}.{what}s"] = _channel(topic, text, message)
        operations[f"decide.{name}"] = {
            **_operation("receive", f"{name}.commands"),
            "reply": {"channel": {"$ref": f"#/channels/{name}.answers"}},
        }
    versions = [entity_type.schema_version for entity_type in app.entities.values()]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": app.name,
            "version": str(max(versions, default=1)),
            "description": "Topics of an entity changelog. Readers must be read_committed.",
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages},
    }


def _message(
    name: str, summary: str, entity: str, headers: SchemaObject | None = None
) -> SchemaObject:
    schema = {"$ref": f"./{name}.schema.json"}
    return {
        "name": name,
        "summary": summary,
        "contentType": "application/json",
        "payload": {"schemaFormat": _FORMAT, "schema": schema},
        "bindings": {
            "kafka": {"key": {"type": "string", "description": f"The key of the {entity}."}}
        },
        **({} if headers is None else {"headers": headers}),
    }


def _channel(topic: str, description: str, message: str) -> SchemaObject:
    return {
        "address": topic,
        "description": description,
        "messages": {message: {"$ref": f"#/components/messages/{message}"}},
    }


def _operation(action: str, channel: str) -> SchemaObject:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}}
