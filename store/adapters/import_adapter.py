"""Import of an adapter: fetch, validate, and store under its digest, before any record names it.

It can be killed at any moment: records only name stored files, and a stored adapter without a record is
deleted later as unused.
"""

from __future__ import annotations

from typing import NamedTuple

from policy.errors import PreconditionFailed
from store.adapters.adapter_aliases import NewVersion
from store.adapters.base_model_shapes import BaseModelShapes
from store.adapters.blobs import AdapterBlobStore
from store.adapters.fetch import fetch
from store.adapters.fetch_context import FetchJob, redacted
from store.adapters.public_hosts import PublicHosts
from store.adapters.validate import ValidationLimits, validate
from store.progress_report import ProgressLine, Report


class ImportLimits(NamedTuple):
    """The requirements of a model on its adapters; see :func:`store.adapters.validate.validate`.

    ``token_file`` may hold a Hugging Face token. ``hosts`` are those that sources may be fetched from.
    """

    base: BaseModelShapes | None
    limits: ValidationLimits
    token_file: str | None = None
    hosts: PublicHosts | None = None


def import_adapter(blobs: AdapterBlobStore, source: str, terms: ImportLimits, report: Report) -> NewVersion:
    """Import the adapter at ``source`` into ``blobs``; blocks until it is stored.

    Raises :class:`policy.errors.AdapterRefused` for an invalid adapter, and
    :class:`policy.errors.PreconditionFailed` if nothing can be stored here.
    """
    try:
        with blobs.work() as work, blobs.parts(source) as parts:
            into = work / "adapter"
            into.mkdir(mode=0o700)
            job = FetchJob(source, into, parts, terms.limits.max_bytes, report, terms.token_file, terms.hosts)
            fetch(job)
            facts = validate(into, terms.base, terms.limits, job.progress("check", "checking its numbers"))
            report(ProgressLine(step="store", message="forcing it to disk"))
            digest = blobs.seal(into, redacted(source))
            blobs.publish(into, digest)
            return NewVersion(digest, facts, redacted(source))
    except OSError as error:
        raise PreconditionFailed(f"the adapter cannot be stored: {error}") from error
