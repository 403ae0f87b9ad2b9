"""Checks of the GPUs: driver, memory, clocks, errors, and how they are connected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from policy.wire.controller_reports import GpuReport, is_of_card
from serve.gpu_inventory import NVLINK, GpuCard, GpuInventory
from serve.gpu_metrics import REASONS
from tidegate.doctor.finding import Finding, error, not_applicable, ok, warning

_GIB = 1024**3
_MIB = 1024**2
# A display or a monitor takes less than this; an engine takes more.
_IN_USE_BYTES = _GIB
# The software power cap is what a busy GPU normally reports.
_POWER_CAP = 0x04
_HOT = sum(REASONS) & ~_POWER_CAP


def driver(
    inventory: GpuInventory | str, *, present: bool, wanted: bool, torch_cuda: tuple[int, int] | None
) -> Finding:
    """The driver; GPUs are ``present`` if the PCI bus has some, and ``wanted`` by the deployment."""
    check = "GPU driver"
    if isinstance(inventory, str):
        if present:
            return error(
                check,
                f"this machine has an NVIDIA GPU, but it cannot be read: {inventory}",
                "install NVIDIA's driver and requirements/gpu.txt; in a container use --gpus all",
            )
        if wanted:
            return error(
                check,
                f"the deployment has shapes with GPUs, but no NVIDIA GPU is found: {inventory}",
                "use a machine with GPUs, or shapes with cpus",
            )
        return not_applicable(check, f"no NVIDIA GPU on this machine ({inventory})")
    cuda = f"CUDA {inventory.cuda[0]}.{inventory.cuda[1]}"
    if torch_cuda is not None and torch_cuda[0] > inventory.cuda[0]:
        return error(
            check,
            f"{inventory.driver} runs programs up to {cuda}; torch is built for CUDA {torch_cuda[0]}",
            "install a newer driver",
        )
    return ok(check, f"{inventory.driver}, for {cuda}")


def cards(inventory: GpuInventory, *, running: bool) -> Finding:
    """The GPUs, and whether others use them; a ``running`` deployment does."""
    check = "GPUs"
    if not inventory.cards:
        return warning(check, "the driver finds no GPU", "in a container use --gpus all; else see dmesg")
    used = _each(
        inventory.cards,
        lambda card: f"{card.memory_used / _GIB:.1f} GiB" if card.memory_used > _IN_USE_BYTES else "",
    )
    kinds = Counter((card.name, round(card.memory_total / _GIB)) for card in inventory.cards)
    found = ", ".join(f"{count} x {name}, {gib} GiB each" for (name, gib), count in kinds.items())
    in_use = f"memory in use by other processes: {used}" if used and not running else ""
    return _found(check, found, in_use, "stop them (nvidia-smi lists them), or engines may not start")


def memory_errors(inventory: GpuInventory) -> Finding:
    """Errors of the GPUs' memory."""
    check = "GPU memory errors"
    if failed := _each(inventory.cards, _memory_error):
        return error(check, failed, "reset or restart the machine; replace a GPU whose errors come back")
    if pending := _each(
        inventory.cards, lambda card: "a row waits to be replaced" if card.rows_pending else ""
    ):
        return warning(check, pending, "reset the GPU or restart the machine when it is idle")
    if all(card.ecc_uncorrected is None for card in inventory.cards):
        return not_applicable(check, "the GPUs have no ECC, or it is off")
    return ok(check, "no uncorrected error since the driver was loaded")


def _memory_error(card: GpuCard) -> str:
    if card.rows_failed:
        return "no spare memory rows are left"
    return f"{card.ecc_uncorrected} uncorrected ECC errors" if card.ecc_uncorrected else ""


def clocks(inventory: GpuInventory) -> Finding:
    """Whether the GPUs are throttled now."""
    check = "GPU clocks"
    if throttled := _each(inventory.cards, lambda card: _clock(card) if card.reasons & _HOT else ""):
        return warning(
            check, throttled, "check cooling and power supply; replicas throttled for a minute are replaced"
        )
    now = [card.clock_mhz for card in inventory.cards if card.clock_mhz is not None]
    if not now:
        return not_applicable(check, "the GPUs do not report their clocks")
    capped = _each(inventory.cards, lambda card: "power cap" if card.reasons & _POWER_CAP else "")
    return ok(check, f"not throttled, {min(now)} to {max(now)} MHz now" + (f"; {capped}" if capped else ""))


def _clock(card: GpuCard) -> str:
    words = ", ".join(word for bit, word in REASONS.items() if card.reasons & bit)
    heat = "" if card.celsius is None else f", {card.celsius:.0f} C"
    return f"{words}, {card.clock_mhz or '?'} of {card.clock_max_mhz or '?'} MHz{heat}"


def pcie(inventory: GpuInventory) -> Finding:
    """Whether each GPU has all of its PCIe lanes. Their speed falls when a GPU is idle, which is normal."""
    check = "GPU PCIe lanes"
    narrow = _each(
        inventory.cards,
        lambda card: (
            f"{card.pcie_width} of {card.pcie_width_max}"
            if (card.pcie_width or 0) < (card.pcie_width_max or 0)
            else ""
        ),
    )
    if narrow:
        return warning(
            check,
            f"fewer lanes than the GPU has: {narrow}",
            "check slot, riser and BIOS; loading takes longer",
        )
    widths = sorted({card.pcie_width for card in inventory.cards if card.pcie_width})
    return ok(check, "/".join(map(str, widths))) if widths else not_applicable(check, "not reported")


def topology(inventory: GpuInventory, gpus_per_replica: int) -> Finding:
    """How the GPUs are connected, for replicas of several."""
    check = "GPU topology"
    if not inventory.links:
        return not_applicable(check, "fewer than two GPUs")
    pairs = Counter(link.through for link in inventory.links)
    found = ", ".join(
        f"{count} {'pair' if count == 1 else 'pairs'} by {through}" for through, count in pairs.most_common()
    )
    slow = gpus_per_replica > 1 and set(pairs) != {NVLINK}
    return _found(
        check,
        found,
        f"the largest replica has {gpus_per_replica} GPUs" if slow else "",
        "without NVLink each step of such a replica takes longer: prefer shapes with fewer GPUs",
    )


def persistence(inventory: GpuInventory) -> Finding:
    """Whether the driver stays loaded while no program uses a GPU."""
    check = "GPU persistence mode"
    if off := _each(inventory.cards, lambda card: "off" if card.persistent is False else ""):
        return warning(
            check,
            off,
            "sudo nvidia-smi -pm 1: without it the driver is unloaded when idle, and starts take longer",
        )
    return (
        ok(check, "on")
        if any(card.persistent for card in inventory.cards)
        else not_applicable(check, "not reported")
    )


def replicas(reports: Mapping[str, GpuReport] | None) -> Finding:
    """What the replicas of the running deployment report of their GPUs, on any node."""
    check = "GPUs of replicas"
    if not reports:
        return not_applicable(check, "no deployment runs" if reports is None else "no replica reports GPUs")
    failed = {name: _failure(report) for name, report in reports.items()}
    slow = {name: report.throttled for name, report in reports.items() if report.reasons & _HOT}
    if any(failed.values()):
        return error(
            check,
            "; ".join(f"{name}: {why}" for name, why in failed.items() if why),
            "the replica is replaced; take the GPU out of the node, or the node out of the cluster",
        )
    if slow:
        return warning(
            check,
            "; ".join(f"{name}: {why}" for name, why in slow.items()),
            "check cooling and power supply of its node",
        )
    watts = sum(report.watts for report in reports.values())
    return ok(check, f"{len(reports)} report, {watts:.0f} W in sum; no error, not throttled")


def _failure(report: GpuReport) -> str:
    if is_of_card(report.xid):
        return f"XID {report.xid} on {report.card or 'a GPU'}"
    return f"{report.ecc_uncorrected} uncorrected ECC errors" if report.ecc_uncorrected else ""


def _each(inventory: Sequence[GpuCard], fault: Callable[[GpuCard], str]) -> str:
    """The faults by GPU, those that are alike together."""
    found: dict[str, list[str]] = {}
    for index, card in enumerate(inventory):
        if text := fault(card):
            found.setdefault(text, []).append(str(index))
    return "; ".join(
        f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)}: {text}" for text, gpus in found.items()
    )


def _found(check: str, found: str, problem: str, advice: str) -> Finding:
    """What was found; with a ``problem`` a warning."""
    return warning(check, f"{found}; {problem}", advice) if problem else ok(check, found)
