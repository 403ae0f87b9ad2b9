"""Adapters from the Hugging Face hub: the two files of one commit."""

from __future__ import annotations

import huggingface_hub

from policy.errors import ModelUnavailable, TidegateError
from store.adapters import FILES
from store.adapters.fetch_context import FetchJob
from store.adapters.validate import check_names
from store.model_weights.hub_source import ID, explain, limit_silence, read_token, reporter

SCHEME = "hf:"


def fetch(job: FetchJob) -> None:
    """Download from ``hf:ORG/NAME[@REVISION]``; an interrupted download is resumed.

    Raises :class:`policy.errors.AdapterRefused`: ``source_unreachable``, ``too_large``, ``pickle`` and
    ``not_an_adapter``.
    """
    name = job.source.removeprefix(SCHEME)
    match = ID.fullmatch(name)
    if match is None:
        raise job.unreachable("expected hf:ORG/NAME or hf:ORG/NAME@REVISION")
    try:
        token = read_token(job.token_file)
    except ModelUnavailable as error:
        raise job.unreachable(error) from error
    limit_silence()
    try:
        info = huggingface_hub.HfApi(token=token).model_info(
            match["repo"], revision=match["revision"], files_metadata=True
        )
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        check_names(sizes)
        whole = sum(sizes[file] for file in FILES)
        if whole > job.max_bytes:
            raise job.too_large(whole)
        # By commit, because the branch may move between the two files.
        huggingface_hub.snapshot_download(
            match["repo"],
            revision=info.sha,
            token=token,
            allow_patterns=list(FILES),
            local_dir=job.parts,
            tqdm_class=reporter(job.source, job.report),
        )
    except TidegateError:  # refused, or the job was cancelled
        raise
    except Exception as error:  # the hub's client and its backends have their own exceptions
        raise job.unreachable(explain(name, token, error)) from error
    if not all((job.parts / file).is_file() for file in FILES):
        # Its client returns what is here if the hub fails after the first answer.
        raise job.unreachable("the Hugging Face hub cannot be reached any more")
    for file in FILES:
        # The hub's sizes may be wrong; the files are measured again when they are validated.
        (job.parts / file).rename(job.into / file)
