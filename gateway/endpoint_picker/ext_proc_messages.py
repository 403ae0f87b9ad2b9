"""The messages of Envoy's external processing (``envoy.service.ext_proc.v3``) that an endpoint picker needs.

They are declared here, by the field numbers of Envoy's API: the packages that have all of that API replace
files of OpenTelemetry's packages by older ones. Texts that may hold any byte are bytes, as on the wire.
"""

from __future__ import annotations

from typing import Any

from gateway.grpc_server.protobuf_declarations import STRUCT, declare

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# HeaderValueOption.HeaderAppendAction
OVERWRITE_IF_EXISTS_OR_ADD = 2

# By message: field, number, type; "*" for repeated fields, "?" for those of a oneof, of which one is set.
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "HeaderValue": [("key", 1, "bytes"), ("value", 2, "bytes"), ("raw_value", 3, "bytes")],
    "HeaderMap": [("headers", 1, "*HeaderValue")],
    "HttpHeaders": [("headers", 1, "HeaderMap"), ("end_of_stream", 3, "bool")],
    "HttpBody": [("body", 1, "bytes"), ("end_of_stream", 2, "bool")],
    "HttpTrailers": [("trailers", 1, "HeaderMap")],
    "Metadata": [("filter_metadata", 1, "*MetadataEntry")],
    "MetadataEntry": [("key", 1, "bytes"), ("value", 2, STRUCT)],
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
        ("dynamic_metadata", 8, STRUCT),
    ],
}


_CLASSES = declare("ext_proc", _MESSAGES)
ProcessingRequest: Any = _CLASSES["ProcessingRequest"]
ProcessingResponse: Any = _CLASSES["ProcessingResponse"]
