"""A node: follows its desired instances, and admits requests to them.

A slot of the node, as the control plane numbers them, is one of its worker groups.
"""

import asyncio
import time
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry

from dataplane.agent.answer_constraints import answer_constraint
from dataplane.agent.answers import Answer, answer_text, engine_request
from dataplane.agent.constraints import ConstraintChecker
from dataplane.agent.fences import Fences
from dataplane.agent.host_files import HostFiles
from dataplane.agent.hosted_adapters import with_leaving_adapters, with_shared_load
from dataplane.agent.hosted_instances import HostedInstance
from dataplane.agent.measures import RequestMeasure, RequestMeasures
from dataplane.agent.newest_term import NewestTerm
from dataplane.agent.node_groups import NodeGroups
from dataplane.agent.parsing.answer_text import Parsed
from dataplane.agent.parsing.families import families_of
from dataplane.agent.pool_reports import pool_reports
from dataplane.agent.pooled_answers import (
    PooledAnswer,
    PoolingRules,
    check_task,
    pooled_prompt,
    pooled_request,
    takes_pairs,
)
from dataplane.agent.prompts import PromptTokenizer
from dataplane.agent.sampling import check_sampling
from dataplane.agent.settings import AgentSettings
from dataplane.agent.templates.renderers import TemplateRenderers
from dataplane.agent.token_questions import detokenized, tokenized
from dataplane.agent.tokenization import LoadTokenizer, Tokenizer, TokenizerCache, load_tokenizer
from dataplane.agent.worker_groups import WorkerGroup
from dataplane.agent.worker_link import WorkerLink
from dataplane.agent.workers import NodeResources, StartWorker, WorkerSupervisor
from dataplane.checkpoints.pooling import EmbeddingRules
from dataplane.dispatch.requests import InflightRequest
from dataplane.protocol.errors import (
    BadRequestError,
    StaleEpochError,
    StaleGenerationError,
    StaleTermError,
    UnknownInstanceError,
    WorkerLostError,
)
from dataplane.protocol.messages import (
    DesiredInstance,
    DesiredInstances,
    Detokenize,
    Detokenized,
    Generate,
    Heartbeat,
    InstanceReport,
    ModelSpec,
    Tokenize,
    Tokenized,
)

_POLL_S = 0.05


class Agent:
    """One node, on one event loop. `changed` is set when its state has changed, for the next heartbeat."""

    def __init__(
        self,
        settings: AgentSettings,
        boot_id: str,
        *,
        start_worker: StartWorker = WorkerLink.start,
        load_tokenizer: LoadTokenizer = load_tokenizer,
    ) -> None:
        self.settings = settings
        self.boot_id = boot_id
        self.changed = asyncio.Event()
        self.said_closing = asyncio.Event()
        """Whether the control plane has heard that the node takes no requests any more."""
        self.registry = CollectorRegistry()
        self._measures = RequestMeasures(self.registry)
        self.generation = 0
        """The desired state that this node follows; 0 before it received one."""
        self._newest_term = NewestTerm(settings.state_dir)
        self._leaving = self._closing = self._handing_over = self._told = self._started = False
        self._fences = Fences(settings.fences_max)
        self._renderers = TemplateRenderers(
            processes_max=settings.template_processes_max, time_max_s=settings.template_time_max_s
        )
        self._prompts = PromptTokenizer(settings, self._renderers)
        self._constraints = ConstraintChecker(settings)
        self._misplaced: tuple[DesiredInstance, ...] = ()
        self._desired: dict[str, DesiredInstance] = {}
        self._files = HostFiles(settings, boot_id)
        tokenizers = TokenizerCache(settings.engine, load_tokenizer, self._renderers.variables)
        resources = NodeResources(
            settings=settings, files=self._files, tokenizers=tokenizers, start_worker=start_worker
        )
        self.groups = NodeGroups(resources, on_change=self.changed.set)

    @property
    def workers(self) -> tuple[WorkerSupervisor, ...]:
        """The workers that the node has now, by their numbers."""
        return self.groups.workers

    @property
    def term(self) -> int:
        """The newest term of the control plane's primary that this node has seen; 0 before it has seen one."""
        return self._newest_term.value

    @property
    def host_bytes(self) -> int:
        """Host memory for models: `cache_bytes`, or less where the file system is smaller."""
        return self._files.cache_bytes

    async def run(self) -> None:
        """Keep every worker running until cancelled; then end them."""
        self._files.open()
        try:
            await self.groups.run()
        finally:
            self.groups.end_requests(WorkerLostError("the agent is shutting down"))
            await self._constraints.close()
            self._files.close()
            await self._renderers.close()

    def apply(self, desired: DesiredInstances) -> None:
        """Follow a desired state.

        Raises:
            StaleTermError: it comes from the primary of an older term than this node has seen.
            StaleGenerationError: this node follows a newer one.
        """
        if 0 < desired.term < self.term:
            raise StaleTermError(
                f"term {desired.term} is older than {self.term}, which this node has seen", param="term"
            )
        if desired.generation < self.generation:
            raise StaleGenerationError(
                f"generation {desired.generation} is older than {self.generation}, which this node follows",
                param="generation",
            )
        self._newest_term.note(desired.term)
        self._told = True
        self.generation = desired.generation
        self._handing_over = desired.handing_over
        instances = with_leaving_adapters(desired.instances, self._desired.values(), is_hosted=self._is_hosted)
        self._desired = {instance.instance_id: instance for instance in instances}
        for model in {instance.model.name for instance in instances}:
            self._measures.expect(model)
        if desired.layout is not None and self.settings.regroup:
            self.groups.regroup(desired.layout)
        for group in self.groups:
            group.follow(instance for instance in instances if instance.slot == group.number)
        self._misplaced = tuple(instance for instance in instances if instance.slot not in self.groups)

    @property
    def has_started(self) -> bool:
        """Whether the agent has been told which instances it shall hold, and each has been loaded or has failed. It
        stays so: an instance that is placed here later says nothing of the agent.
        """
        if not self._started:
            self._started = self._told and all(each.state != "loading" for each in self.reports())
        return self._started

    async def hand_over(self, *, decided_s: float, max_s: float) -> None:
        """Ask for successors of all instances on other nodes, and serve until they have taken over.

        Returns when no instance is left here, when the control plane has started no successor within `decided_s`
        seconds, or after `max_s` seconds. From then on every instance is reported as draining.
        """
        self._leaving = True
        self.changed.set()
        started_s = time.monotonic()
        while self._desired and (waited_s := time.monotonic() - started_s) < max_s:
            if waited_s >= decided_s and not self._handing_over:
                break
            await asyncio.sleep(_POLL_S)
        self._closing = True
        self.changed.set()

    def forget_generation(self) -> None:
        """Accept any generation next: the control plane does not know this node and counts from the start again."""
        self.generation = 0

    def drop_measures(self) -> None:
        """Drop the counters of models that are not here any more, when they have been read."""
        self._measures.drop({instance.model.name for instance in self._desired.values()})

    @property
    def closing(self) -> bool:
        """Whether heartbeats say that no instance takes requests any more."""
        return self._closing

    def reports(self) -> tuple[InstanceReport, ...]:
        misplaced = [
            InstanceReport(
                instance_id=instance.instance_id,
                model=instance.model.name,
                slot=instance.slot,
                state="failed",
                error=f"slot {instance.slot} does not exist; this node has {len(self.groups)}",
            )
            for instance in self._misplaced
        ]
        return (*(self._with_lease(group, one) for group in self.groups for one in group.reports()), *misplaced)

    def _with_lease(self, group: WorkerGroup, report: InstanceReport) -> InstanceReport:
        """A group's report with the states that follow from leases and shutdown; for its group both are ready."""
        desired = self._desired[report.instance_id]
        state = report.state
        if desired.spot and state == "ready":
            left = desired.lease_id is None and group.in_use(report.instance_id)
            state = "draining" if left else "spot"
        if self._closing and state == "ready":
            state = "draining"
        return msgspec.structs.replace(report, state=state, kind=desired.kind)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            node=self.settings.node,
            boot_id=self.boot_id,
            generation=self.generation,
            term=self.term,
            instances=with_shared_load(self.reports()),
            switches_total=self.switches_total,
            load=max((worker.load for worker in self.workers if worker.kind != "prefill"), default=0.0),
            leaving=self._leaving,
            pools=pool_reports(self.groups),
            hosts=tuple(state for worker in self.workers for state in worker.host_states),
        )

    @property
    def switches_total(self) -> int:
        """Model switches on all workers since the agent started."""
        return int(self.groups.former["switches"]) + sum(worker.switches_total for worker in self.workers)

    async def admit(self, generate: Generate) -> Answer | PooledAnswer:
        """Check and tokenize a request, and send it to its instance.

        Raises:
            DataplaneError: the refusal; its class says why.
        """
        check_sampling(generate, stop_strings_max=self.settings.stop_strings_max)
        self._check_lease(generate)
        self._fences.enter(generate.fence, generate.epoch)
        group, hosted, tokenizer = self._ready(generate.instance_id, generate.model)
        model = hosted.desired.model
        check_task(generate, model)
        group.check_queue()
        tokens_max = min(model.context_tokens, group.kv_tokens_max(generate.instance_id))
        if hosted.rules is not None:
            return await self._admit_pooled(generate, group, hosted, hosted.rules, tokens_max=tokens_max)
        families = families_of(model, tokenizer.template)
        prompt = await self._prompts.tokenize(generate, tokenizer, family=families.tools, tokens_max=tokens_max)
        check = partial(self._constraints.check, folder=hosted.folder)
        constraint = await answer_constraint(generate, families, tokenizer, prompt.tail, check)
        text = answer_text(generate, tokenizer, families, prompt.tail)
        resumed = await asyncio.to_thread(text.resume, generate.generated) if generate.generated else Parsed()
        self._check_again(generate, group, model)
        request = engine_request(generate, prompt.tokens, model, tokens_max=tokens_max, constraint=constraint)
        inflight = self._fenced(generate, group, group.submit(request))
        measure = RequestMeasure(self._measures, model.name, len(prompt.tokens), time.monotonic)
        return Answer(inflight, text, cancel=group.cancel, measure=measure, resumed=resumed)

    async def tokenize(self, asked: Tokenize) -> Tokenized:
        """The tokens of a text, as the model of an instance sees it.

        Raises:
            DataplaneError: the refusal; its class says why.
        """
        group, hosted, tokenizer = self._ready(asked.instance_id, asked.model)
        model = hosted.desired.model
        context_tokens = min(model.context_tokens, group.kv_tokens_max(asked.instance_id))
        return await tokenized(asked, self._prompts, tokenizer, model, context_tokens=context_tokens)

    async def detokenize(self, asked: Detokenize) -> Detokenized:
        """The text of tokens of the model of an instance; raises as `tokenize`."""
        _, _, tokenizer = self._ready(asked.instance_id, asked.model)
        return await detokenized(asked, tokenizer)

    def _ready(self, instance_id: str, model: str) -> tuple[WorkerGroup, HostedInstance, Tokenizer]:
        """An instance that is ready and runs this model, with its group and its tokenizer."""
        group = self._group_of(instance_id)
        hosted = group.ready_instance(instance_id)
        if model != hosted.desired.model.name:
            raise BadRequestError(
                f"instance {instance_id} runs {hosted.desired.model.name}, not {model}", param="model"
            )
        assert hosted.tokenizer is not None, "an instance is ready only with its tokenizer"
        return group, hosted, hosted.tokenizer

    async def _admit_pooled(
        self, generate: Generate, group: WorkerGroup, hosted: HostedInstance, rules: PoolingRules, *, tokens_max: int
    ) -> PooledAnswer:
        """`admit` for a model that embeds or scores."""
        model, tokenizer = hosted.desired.model, hosted.tokenizer
        assert tokenizer is not None
        if isinstance(rules, EmbeddingRules) and rules.tokens_max is not None:
            tokens_max = min(tokens_max, rules.tokens_max)
        asked = pooled_prompt(generate, rules, tokenizer.template)
        if asked.messages is not None and not takes_pairs(tokenizer.template):
            query, document = (message.content for message in asked.messages)
            prompt = await self._prompts.tokenize_pair(query, document, tokenizer, tokens_max=tokens_max)
        else:
            prompt = (await self._prompts.tokenize(asked, tokenizer, tokens_max=tokens_max)).tokens
        self._check_again(generate, group, model)
        request = pooled_request(asked, prompt, model, tokens_max=tokens_max)
        inflight = self._fenced(asked, group, group.submit(request))
        measure = RequestMeasure(self._measures, model.name, len(prompt), time.monotonic)
        return PooledAnswer(inflight, rules, dimensions=generate.dimensions, cancel=group.cancel, measure=measure)

    def _fenced(self, generate: Generate, group: WorkerGroup, inflight: InflightRequest) -> InflightRequest:
        """The request in flight, unless a newer claim of it arrived while it was tokenized."""

        def cancel(inflight: InflightRequest) -> None:
            group.cancel(inflight.request)

        try:
            self._fences.run(generate.fence, generate.epoch, inflight, cancel)
        except StaleEpochError:
            cancel(inflight)
            raise
        return inflight

    def _check_again(self, generate: Generate, group: WorkerGroup, model: ModelSpec) -> None:
        """What may have changed while a request was tokenized: its lease, its instance's group and model, the queue."""
        self._check_lease(generate)
        ready_group, hosted, _ = self._ready(generate.instance_id, generate.model)
        if ready_group is not group or not hosted.desired.model.is_same(model):
            raise UnknownInstanceError(
                f"instance {generate.instance_id} was replaced while the request was tokenized", param="instance_id"
            )
        group.check_queue()

    def _check_lease(self, generate: Generate) -> None:
        """Only its lessee may use a spot instance, and only as long as the lease lasts."""
        desired = self._desired.get(generate.instance_id)
        if desired is None or (generate.lease_id is None and not desired.spot):
            return
        if generate.lease_id is None:
            raise UnknownInstanceError(f"instance {generate.instance_id} is lent out", param="instance_id")
        if generate.lease_id != desired.lease_id:
            raise UnknownInstanceError(
                f"the lease of instance {generate.instance_id} has ended or is another's", param="lease_id"
            )

    def _is_hosted(self, instance_id: str) -> bool:
        return any(group.has(instance_id) for group in self.groups)

    def _group_of(self, instance_id: str) -> WorkerGroup:
        for group in self.groups:
            if group.has(instance_id):
                return group
        raise UnknownInstanceError(f"instance {instance_id} is not on this node", param="instance_id")
