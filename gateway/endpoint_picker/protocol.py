"""The messages of Envoy's external processing (``envoy.service.ext_proc.v3``) that an endpoint picker needs.

They are declared here, by the field numbers of Envoy's API: the packages that have all of that API replace
files of OpenTelemetry's packages by older ones. Texts that may hold any byte are bytes, as on the wire.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# HeaderValueOption.HeaderAppendAction
OVERWRITE_IF_EXISTS_OR_ADD = 2

_PACKAGE = "tidegate.ext_proc"
_STRUCT = "google.protobuf.Struct"
_TYPES = {"bytes": 12, "bool": 8, "int32": 5}
# By message: field, number, type; "*" for repeated fields, "?" for those of a oneof, of which one is set.
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "HeaderValue": [("key", 1, "bytes"), ("value", 2, "bytes"), ("raw_value", 3, "bytes")],
    "HeaderMap": [("headers", 1, "*HeaderValue")],
    "HttpHeaders": [("headers", 1, "HeaderMap"), ("end_of_stream", 3, "bool")],
    "HttpBody": [("body", 1, "bytes"), ("end_of_stream", 2, "bool")],
    "HttpTrailers": [("trailers", 1, "HeaderMap")],
    "Metadata": [("filter_metadata", 1, "*MetadataEntry")],
    "MetadataEntry": [("key", 1, "bytes"), ("value", 2, _STRUCT)],
    "ProcessingRequest": [
        ("request_headers", 2, "?HttpHeaders"),
        ("response_headers", 3, "?HttpHeaders"),
        ("request_body", 4, "?HttpBody"),
        ("response_body", 5, "?HttpBody"),
        ("request_trailers", 6, "?HttpTrailers"),
        ("response_trailers", 7, "?HttpTrailers"),
        ("metadata_context", 8, "Metadata"),
    ],
    "HeaderValueOption": [("header", 1, "HeaderValue"), ("append_action", 3, "int32")],
    "HeaderMutation": [("set_headers", 1, "*HeaderValueOption"), ("remove_headers", 2, "*bytes")],
    "StreamedBodyResponse": [("body", 1, "bytes"), ("end_of_stream", 2, "bool")],
    "BodyMutation": [("streamed_response", 3, "StreamedBodyResponse")],
    "CommonResponse": [("header_mutation", 2, "HeaderMutation"), ("body_mutation", 3, "BodyMutation")],
    "HeadersResponse": [("response", 1, "CommonResponse")],
    "BodyResponse": [("response", 1, "CommonResponse")],
    "TrailersResponse": [("header_mutation", 1, "HeaderMutation")],
    "HttpStatus": [("code", 1, "int32")],
    "ImmediateResponse": [
        ("status", 1, "HttpStatus"),
        ("headers", 2, "HeaderMutation"),
        ("body", 3, "bytes"),
    ],
    "ProcessingResponse": [
        ("request_headers", 1, "?HeadersResponse"),
        ("response_headers", 2, "?HeadersResponse"),
        ("request_body", 3, "?BodyResponse"),
        ("response_body", 4, "?BodyResponse"),
        ("request_trailers", 5, "?TrailersResponse"),
        ("response_trailers", 6, "?TrailersResponse"),
        ("immediate_response", 7, "?ImmediateResponse"),
        ("dynamic_metadata", 8, _STRUCT),
    ],
}


def _made() -> dict[str, Any]:
    """The classes of all messages, by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="tidegate/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    for name, fields in _MESSAGES.items():
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
                declared.type_name = f".{plain}" if "." in plain else f".{_PACKAGE}.{plain}"
            if kind.startswith("?"):
                declared.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in ("ProcessingRequest", "ProcessingResponse")
    }


_CLASSES = _made()
ProcessingRequest: Any = _CLASSES["ProcessingRequest"]
ProcessingResponse: Any = _CLASSES["ProcessingResponse"]
