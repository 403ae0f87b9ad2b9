"""`external.metrics.k8s.io` on the admin port: desired counts as a metric, for HPAs and KEDA.

Source: ``k8s.io/metrics/pkg/apis/external_metrics/v1beta1``.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query

from gateway.api.dependencies import GatewayServices, JsonResponse
from gateway.routing.external_autoscaler_counts import METRIC, CountUnknown, desired_count

GROUP = "/apis/external.metrics.k8s.io/v1beta1"
_VERSION = "external.metrics.k8s.io/v1beta1"

router = APIRouter()


@router.get(GROUP, summary="The external metrics for Kubernetes")
async def resources() -> JsonResponse:
    """An `APIResourceList`."""
    metric = {
        "name": METRIC,
        "singularName": "",
        "namespaced": True,
        "kind": "ExternalMetricValueList",
        "verbs": ["get"],
    }
    listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": _VERSION}
    return JsonResponse({**listed, "resources": [metric]})


@router.get(f"{GROUP}/namespaces/{{namespace}}/{METRIC}", summary="Desired replicas of a model, for an HPA")
async def replicas(
    services: GatewayServices,
    namespace: str,
    selector: Annotated[str, Query(alias="labelSelector", description="`model=NAME`, `shape=NAME`")] = "",
) -> JsonResponse:
    """An `ExternalMetricValueList`; 404 with a `Status` for a model that no autoscaler scales."""
    labels = dict(part.split("=", 1) for part in selector.replace("==", "=").split(",") if "=" in part)
    try:
        count = desired_count(services.fleet, labels.get("model", ""), labels.get("shape", ""))
    except CountUnknown as unknown:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}
        return JsonResponse({**status, "message": str(unknown), "code": 404}, 404)
    value = {
        "metricName": METRIC,
        "metricLabels": labels,
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": str(count),
    }
    kind = {"kind": "ExternalMetricValueList", "apiVersion": _VERSION, "metadata": {}}
    return JsonResponse({**kind, "items": [value]})
