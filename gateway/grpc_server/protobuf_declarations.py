"""Messages of gRPC that are declared by the numbers and types of their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

STRUCT = "google.protobuf.Struct"
# As FieldDescriptorProto.Type numbers them.
_TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}

Fields = Sequence[tuple[str, int, str]]


def declare(package: str, messages: Mapping[str, Fields]) -> dict[str, Any]:
    """The classes of ``messages`` by name, each with its fields: name, number, type.

    A type is one of protobuf's, :data:`STRUCT`, or another of the messages; "*" is before that of a repeated
    field, "?" before those of a oneof, of which one is set.
    """
    package = f"tidegate.{package}"
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package.replace('.', '/')}.proto",
        package=package,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        if any(kind.startswith("?") for _, _, kind in fields):
            message.oneof_decl.add(name="kind")
        for field, number, kind in fields:
            plain = kind.lstrip("*?")
            declared = message.field.add(name=field, number=number, label=3 if kind.startswith("*") else 1)
            if plain in _TYPES:
                declared.type = _TYPES[plain]
            else:
                declared.type = 11
                declared.type_name = f".{plain}" if "." in plain else f".{package}.{plain}"
            if kind.startswith("?"):
                declared.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in messages
    }
