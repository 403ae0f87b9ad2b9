"""OpenTelemetry traces of requests. Read first: `request_trace`."""
