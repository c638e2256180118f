# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connector over crumbd. See crumb.vllm."""

import dataclasses
import hashlib
import time
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional, Set, Tuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole,
                                                               KVConnectorWorkerMetadata,
                                                               SupportsHMA)
from vllm.logger import init_logger

from crumb import _checkpoints, _engines
from crumb.errors import InvalidArgument
from crumb.transfer import Transfer
from crumb.vllm import _events, _model, _native
from crumb.vllm._device import DeviceStreams, StepTimer
from crumb.vllm._jobs import (PAGE_TOKENS, BlockLayout, BlocksBeingStored, LoadJob,
                              StoreJob)
from crumb.vllm._policy import AlwaysLoad, LoadPolicy, slower
from crumb.vllm._requests import Requests
from crumb.vllm._worker import PageMover
from crumb.vllm.metrics import CrumbPromMetrics, CrumbStats
from crumb.worker import Rank

if TYPE_CHECKING:
    import torch

logger = init_logger(__name__)

# Seconds that a step without tokens waits for a load. A request that arrives meanwhile waits as
# long.
IDLE_SECONDS = 0.001


@dataclasses.dataclass
class StepJobs(KVConnectorMetadata):
    """The work of one step, from the scheduler to the workers."""

    loads: List[LoadJob] = dataclasses.field(default_factory=list)
    stores: List[StoreJob] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0  # tokens of prompts that the step computes
    other_tokens: int = 0   # tokens of decode steps
    number: int = 0         # the step's number, which grows
    behind_stores: int = 0  # the step writes blocks that the stores of this earlier one may read


@dataclasses.dataclass
class StepTimes(KVConnectorWorkerMetadata):
    """A worker's measurements, for the scheduler's choice between loading and computing."""

    loaded_tokens: int = 0
    load_seconds: float = 0.0
    computed_tokens: int = 0
    compute_seconds: float = 0.0
    failed_requests: Tuple[str, ...] = ()
    refused: Tuple[Tuple[str, int, int], ...] = ()  # pages that were not stored
    loaded: Tuple[str, ...] = ()  # requests whose loads by layer have ended

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "KVConnectorWorkerMetadata":
        assert isinstance(other, StepTimes)
        return StepTimes(
            *slower((self.loaded_tokens, self.load_seconds),
                    (other.loaded_tokens, other.load_seconds)),
            *slower((self.computed_tokens, self.compute_seconds),
                    (other.computed_tokens, other.compute_seconds)),
            tuple(set(self.failed_requests) | set(other.failed_requests)),
            tuple(set(self.refused) | set(other.refused)), tuple(set(self.loaded) | set(other.loaded)))


class CrumbConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores the pages of every request in crumbd, and loads the longest stored prefix of a prompt.

    kv_connector_extra_config: "socket_dir" (crumbd's folder of sockets; default /run/crumb),
    "token_file" (with the tenant's token), "history" ("int2" or "bf16", exact pages), "rotation"
    (a rotation file of `crumb calibrate`; default "hadamard", which needs no data), "deadline"
    (seconds that a lookup waits for pages on SSD and other nodes; default 0.2), "weights" (a digest
    of the checkpoint), "model" (a name), "load" ("auto": when it is predicted to beat computing;
    or "always"), "after_reset" ("private": pages that are stored after vLLM reset the connector's
    cache are found by this engine only, because its weights may have changed; or "shared"),
    "staging_bytes" (on GPUs: pinned host memory of each rank for stored pages until they are
    published; default 2 GiB), "load_by_layer" (true: a request joins a step at once, which waits for
    its pages layer by layer; default false: it joins a step when its pages are there).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._native = _native.chosen(vllm_config)  # vLLM's pool has INT2 blocks
        if self._native:
            _native.check_supported(vllm_config, extra)
            layout = _native.layout_of(kv_cache_config)
            self._model = _model.model_of(vllm_config, extra, _native.rotation_of(vllm_config))
        else:
            _model.check_supported(vllm_config, kv_cache_config)
            layout = BlockLayout(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
            self._model = _model.model_of(vllm_config, extra)
        self._deadline = float(extra("deadline", 0.2))
        if extra("load", "auto") not in ("auto", "always"):
            raise InvalidArgument('"load" is "auto" or "always"')
        if extra("after_reset", "private") not in ("private", "shared"):
            raise InvalidArgument('"after_reset" is "private" or "shared"')
        self._shared_after_reset = extra("after_reset", "private") == "shared"
        if self._model.rotation == "hadamard" and self._model.history == "int2":
            logger.info(_engines.HADAMARD_NOTE)
        engine = hashlib.sha256(str(self._kv_transfer_config.engine_id).encode()).digest()[:16]
        self._client = _engines.open_client(
            {name: extra(name, None) for name in ("socket_dir", "token_file")},
            f"vllm {role.name.lower()}", engine, logger)
        parallel = vllm_config.parallel_config
        rank = (Rank() if role == KVConnectorRole.SCHEDULER else
                Rank(parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size))
        self._transfer = Transfer(self._client, self._model, rank=rank)
        self._policy = LoadPolicy() if extra("load", "auto") == "auto" else AlwaysLoad()
        # The scheduler's half, and the workers'; one of them is None.
        self._requests: Optional[Requests] = None
        self._mover: Optional[PageMover] = None
        self._events: Optional[_events.KvEvents] = None
        self._being_stored = BlocksBeingStored(layout)
        if role == KVConnectorRole.SCHEDULER:
            if _events.enabled(vllm_config):
                self._events = _events.KvEvents(
                    _events.hash_block_tokens(vllm_config, kv_cache_config, layout.block_tokens),
                    layout.pages)
            self._requests = Requests(
                self._transfer, layout, self._model.history == "bf16", self._deadline,
                self._policy, adapter_digest=_checkpoints.adapter_digest, engine_id=engine,
                cache_pages=_cache_pages(kv_cache_config, layout),
                announce=self._events.announce if self._events is not None else None)
        else:
            self._mover = PageMover(self._transfer, layout, self._deadline)
        self._staging_bytes = int(extra("staging_bytes", 0))
        self._by_layer = bool(extra("load_by_layer", False))
        self._layer_numbers: Dict[str, int] = {}  # layers of the cache, in order
        self._times = StepTimes()
        self._step_begin = 0.0
        self._timer: Optional[StepTimer] = None  # measures steps on a GPU
        self._stats = CrumbStats()

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> Tuple[Optional[int], bool]:
        assert self._requests is not None
        tokens = self._requests.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._by_layer

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Dict[str, Any]) -> bool:
        return bool(extra_config.get("load_by_layer", False))  # steps call wait_for_layer_load

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._requests is not None
        self._requests.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._requests is not None
        jobs = StepJobs(self._requests.loads(), self._requests.stores(scheduler_output))
        jobs.number, jobs.behind_stores = self._being_stored.next_step(scheduler_output, jobs.loads,
                                                                       jobs.stores)
        for new in scheduler_output.scheduled_new_reqs:
            jobs.prompt_tokens += scheduler_output.num_scheduled_tokens[new.req_id]
        jobs.other_tokens = scheduler_output.total_num_scheduled_tokens - jobs.prompt_tokens
        return jobs

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._requests is not None
        times = connector_output.kv_connector_worker_meta
        if isinstance(times, StepTimes):
            self._policy.loaded(times.loaded_tokens, times.load_seconds)
            self._policy.computed(times.computed_tokens, times.compute_seconds)
            for request_id in times.failed_requests:
                self._requests.load_failed(request_id)
            for request_id in times.loaded:
                self._requests.load_finished(request_id)
            for request_id, first, end in times.refused:
                self._requests.store_refused(request_id, first, end)
        for request_id in connector_output.finished_recving or ():
            self._requests.load_finished(request_id)

    def reset_cache(self) -> Optional[bool]:
        assert self._requests is not None
        return True if self._shared_after_reset else self._requests.reset()

    def request_finished(self, request: Any,
                         block_ids: List[int]) -> Tuple[bool, Optional[Dict[str, Any]]]:
        assert self._requests is not None
        self._requests.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
            self, request: Any,
            block_ids: Tuple[List[int], ...]) -> Tuple[bool, Optional[Dict[str, Any]]]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def take_events(self) -> Iterable[Any]:
        return self._events.take() if self._events is not None else ()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a page that is not stored is a later miss

    # The workers' half.

    def register_kv_caches(self, kv_caches: Dict[str, "torch.Tensor"]) -> None:
        assert self._mover is not None
        if self._native:
            pools = _native.pools_of(kv_caches)
            self._transfer.use_blocks(pools, owner=kv_caches)
            logger.info("Crumb serves %d layers of INT2 blocks", len(pools))
            return
        scales = (_model.fp8_scales_of(self._vllm_config, kv_caches)
                  if _model.has_fp8_cache(self._vllm_config) else None)
        cache, names = _model.paged_cache_of(kv_caches, self._model.head_dim, scales)
        device = cache.device()
        if device is None:
            _model.check_cpu_layout(self._model.head_dim, cache.block_tokens, scales is not None)
        self._transfer.use_cache(cache, self._staging_bytes)
        self._layer_numbers = {name: number for number, name in enumerate(names)}
        if device is not None:
            self._mover.use_device(DeviceStreams(device))
            self._timer = StepTimer(device)
        logger.info("Crumb serves %d layers, blocks of %d tokens", len(names), cache.block_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._mover is not None
        jobs = self._jobs()
        if jobs.behind_stores:
            self._mover.wait_for_stores(jobs.behind_stores)
        if self._by_layer:
            self._mover.start_layer_loads(jobs.loads)
            if forward_context.attn_metadata is None:  # a graph replays the whole step
                self._mover.wait_for_layers()
        else:
            self._mover.start_loads(jobs.loads)
        self._step_begin = time.monotonic()
        if self._timer is not None and self._measures(jobs):
            self._timer.begin()

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self._mover is not None
        # A layer without rows of its own has no number.
        number = self._layer_numbers.get(layer_name)
        if self._by_layer and number is not None:
            self._mover.wait_for_layer(number)

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any,
                      **kwargs: Any) -> None:
        return  # pages are stored when the step is over: steps that replay a graph skip this call

    def wait_for_save(self) -> None:
        assert self._mover is not None
        jobs = self._jobs()
        if self._timer is not None:
            if self._measures(jobs):
                self._timer.end(jobs.prompt_tokens)
        elif self._measures(jobs) and self._step_begin:
            self._times.computed_tokens += jobs.prompt_tokens
            self._times.compute_seconds += time.monotonic() - self._step_begin
        self._step_begin = 0.0
        self._mover.wait_for_layers()
        self._mover.store(jobs.stores, jobs.number)

    def get_finished(self, finished_req_ids: Set[str]) -> Tuple[Optional[Set[str]],
                                                                Optional[Set[str]]]:
        assert self._mover is not None
        jobs = self._jobs()
        if jobs.prompt_tokens + jobs.other_tokens == 0:
            self._mover.wait_for_load(IDLE_SECONDS)
        return None, self._mover.take_finished() or None

    def get_transfer_results(self, finished_req_ids: Set[str]) -> Any:
        assert self._mover is not None
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving.update(self._mover.take_failed_loads())
        return results

    def get_block_ids_with_load_errors(self) -> Set[int]:
        assert self._mover is not None
        return self._mover.take_failed_blocks()

    def build_connector_worker_meta(self) -> Optional[KVConnectorWorkerMetadata]:
        assert self._mover is not None
        moved = self._mover.take_moved()
        self._stats.add(moved)
        times, self._times = self._times, StepTimes()
        if self._timer is not None:
            times.computed_tokens, times.compute_seconds = self._timer.take()
        times.loaded_tokens = moved.loaded_pages * 64
        times.load_seconds = moved.load_seconds
        times.failed_requests = tuple(self._mover.take_failed_requests())
        times.refused = tuple(self._mover.take_refused())
        times.loaded = tuple(self._mover.take_loaded_by_layer())
        return times if times != StepTimes() else None

    def get_kv_connector_stats(self) -> Optional[CrumbStats]:
        if self._mover is None or self._stats.is_empty():
            return None
        stats, self._stats = self._stats, CrumbStats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: Optional[Dict[str, Any]] = None) -> CrumbStats:
        return CrumbStats(data=data) if data is not None else CrumbStats()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: List[str],
                           per_engine_labelvalues: Dict[int, List[object]]) -> CrumbPromMetrics:
        return CrumbPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._mover is not None:
            self._mover.close()
        if self._requests is not None:
            self._requests.close()
        self._transfer.close()
        self._client.close()

    def _measures(self, jobs: StepJobs) -> bool:
        """Whether a step computes tokens of prompts and little else, so that its time is theirs."""
        return (jobs.prompt_tokens > 4 * jobs.other_tokens and
                not (self._by_layer and jobs.loads))

    def _jobs(self) -> StepJobs:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, StepJobs) else StepJobs()


def _cache_pages(kv_cache_config: Any, layout: BlockLayout) -> int:
    """Pages for which vLLM's own cache has room."""
    return int(kv_cache_config.num_blocks) * layout.block_tokens // PAGE_TOKENS + 1
