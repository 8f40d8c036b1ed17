"""What NVML knows of the GPUs that does not change: names, CUDA's numbering, the topology."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pynvml

LEGEND: Mapping[str, str] = {
    "X": "the GPU itself",
    "NV#": "# NVLinks",
    "INT": "on one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "through host bridges of one NUMA node",
    "SYS": "across NUMA nodes",
    "?": "not reported",
}
_ANCESTOR = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "INT",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
_P2P_READ = 0  # nvidia-ml-py 13 has NVML_P2P_CAPS_INDEX_READ = (0,) by a stray comma


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU. `cuda`: its number in this process's CUDA, None if hidden or not knowable."""

    uuid: str
    name: str
    nvml_index: int
    cuda: int | None
    bus: str
    compute: str  # "9.0"; "" if not reported
    pcie: str  # "Gen5 x16"; "" if not reported
    nvlinks: int  # links that are up
    mig: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between two GPUs: a key of LEGEND (NV18 for 18 NVLinks), and peer access.

    `peer`: True if one may read the other's memory, None if not reported.
    """

    kind: str
    peer: bool | None


def gpu_facts(nvml: Any, handle: Any, index: int) -> GpuFacts:
    """Asks for everything once; NVMLError only if the GPU does not even tell its UUID."""
    uuid = str(nvml.nvmlDeviceGetUUID(handle))
    pci = _ask(nvml.nvmlDeviceGetPciInfo, handle)
    compute = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    generation = _ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    width = _ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    mig = _ask(nvml.nvmlDeviceGetMigMode, handle)
    return GpuFacts(
        uuid=uuid,
        name=str(_ask(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
        nvml_index=index,
        cuda=None,
        bus=_bus(pci),
        compute="{}.{}".format(*compute) if compute else "",
        pcie=f"Gen{generation} x{width}" if generation and width else "",
        nvlinks=len(_links(nvml, handle)),
        mig=bool(mig and mig[0]),
    )


def cuda_order(gpus: Sequence[GpuFacts], environment: Mapping[str, str]) -> list[GpuFacts]:
    """The same GPUs (in NVML's order) with the number that CUDA gives each of them.

    CUDA counts by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID; unlike GPUs are then matched by
    UUID only. As in CUDA, an entry of CUDA_VISIBLE_DEVICES that names nothing ends the list.
    """
    alike = len({gpu.name for gpu in gpus}) <= 1
    by_index = alike or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        wanted = ",".join(str(place) for place in range(len(gpus)))
    numbers: dict[str, int | None] = {}
    for number, entry in enumerate(wanted.split(",")):
        found = _entry(gpus, entry.strip())
        if found is None:
            break
        numbers[found.uuid] = number if by_index or not entry.strip().isdigit() else None
    return [replace(gpu, cuda=numbers.get(gpu.uuid)) for gpu in gpus]


def topology(nvml: Any, handles: Sequence[Any]) -> tuple[tuple[Link, ...], ...]:
    """The matrix of `nvidia-smi topo -m`; a handle None is a lost GPU."""
    links = [{} if handle is None else _links(nvml, handle) for handle in handles]
    buses = [_bus(None if h is None else _ask(nvml.nvmlDeviceGetPciInfo, h)) for h in handles]
    own = Link(kind="X", peer=None)

    def way(a: int, b: int) -> Link:
        if handles[a] is None or handles[b] is None:
            return Link(kind="?", peer=None)
        count = _nvlinks(links[a], links[b], buses[b])
        status = _ask(nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], _P2P_READ)
        ancestor = _ask(nvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b])
        return Link(
            kind=f"NV{count}" if count else _ANCESTOR.get(ancestor, "?"),
            peer=None if status is None else status == pynvml.NVML_P2P_STATUS_OK,
        )

    places = range(len(handles))
    return tuple(tuple(own if a == b else way(a, b) for b in places) for a in places)


def _entry(gpus: Sequence[GpuFacts], entry: str) -> GpuFacts | None:
    if entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    named = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return named[0] if len(named) == 1 else None


def _nvlinks(mine: Mapping[int, str], theirs: Mapping[int, str], bus: str) -> int:
    """Links straight to `bus`, else those that both have into the switch."""
    direct = sum(end == bus for end in mine.values())
    switched = min(list(ends.values()).count("switch") for ends in (mine, theirs))
    return direct or switched


def _links(nvml: Any, handle: Any) -> dict[int, str]:
    """The NVLinks that are up, and where each ends: a PCI bus id, "switch", or "" if unknown."""
    ends: dict[int, str] = {}
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None and not ends:
            break  # a GPU without NVLink, or past its last
        if state == pynvml.NVML_FEATURE_ENABLED:
            kind = _ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            switch = kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            remote = _ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            ends[link] = "switch" if switch else _bus(remote)
    return ends


def _bus(pci: Any) -> str:
    if pci is None:
        return ""
    text = pci.busId
    return str(text.decode() if isinstance(text, bytes) else text).upper()


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """None where NVML has no answer."""
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None
